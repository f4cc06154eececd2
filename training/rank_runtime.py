"""What a rank is told, and how it talks to Postgres and to the other ranks.

Why here: the loop of `training/ray_driver.py` reads as steps; threads, outages and heartbeats are its floor.
Called by: `training/ray_driver.py`, `training/torchrun.py`, the learner's service.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch.distributed as dist
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import FencedError, StoreUnavailableError
from ratchet.store import learners
from ratchet.store.database import Database
from training.learner_commits import RunLease

_LOG = structlog.get_logger()

_T = TypeVar("_T")
_Work = Callable[[AsyncConnection], Awaitable[_T]]

_HEARTBEAT_SECONDS = 5.0
_PLAN_TIMEOUT = timedelta(days=30)
"""How long ranks wait for rank 0, which waits for rollouts. A rank that has died is noticed by its closed connection."""


@dataclass(slots=True, frozen=True)
class RankSettings:
    """What a rank is told; everything else it reads from Postgres."""

    run_id: str
    database_url: str
    policies: Path
    checkpoints: Path
    num_threads: int = 1
    tensorboard: Path | None = None


class BlockingStore:
    """Transactions for a thread without an event loop of its own; an outage of Postgres is waited out."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.database = Database(url, pool_size=1)

    def do(self, work: _Work[_T]) -> _T:
        """Runs `work` in a transaction, again until it is known to have committed: it must be harmless to run twice."""
        delay = 0.2
        while True:
            try:
                return self.runner.run(self._transaction(work))
            except StoreUnavailableError as error:
                _LOG.warning("waiting for postgres", reason=str(error)[:200])
                time.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def _transaction(self, work: _Work[_T]) -> _T:
        async with self.database.begin() as connection:
            return await work(connection)

    def close(self) -> None:
        self.runner.run(self.database.close())
        self.runner.close()


class HeartbeatThread:
    """Writes the learner's row every few seconds from its own thread, so that a long step is not taken for a dead one."""

    def __init__(self, settings: RankSettings, lease: RunLease, world_size: int) -> None:
        self.settings, self.lease, self.world_size = settings, lease, world_size
        self.phase, self.step = "loading the model", lease.step
        self.changed, self.stopped = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def say(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step
        self.changed.set()

    def _beat(self) -> None:
        store = BlockingStore(self.settings.database_url)
        last = False
        while not last:
            self.changed.clear()
            last = self.stopped.is_set()
            store.do(self._write)
            if not last:
                self.changed.wait(_HEARTBEAT_SECONDS)
        store.close()

    async def _write(self, connection: AsyncConnection) -> bool:
        details = {"pid": os.getpid()}
        lease = self.lease
        return await learners.heartbeat_learner(
            connection, lease.run_id, lease.epoch, self.world_size, self.phase, self.step, details
        )

    @contextlib.contextmanager
    def beating(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
            return
        self.thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            self.changed.set()
            self.thread.join(timeout=10)


def lost_peer(error: Exception) -> bool:
    """Whether a collective failed since another rank has ended: no fault of this one. Gloo says so by a RuntimeError with its own files' names."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


class Ranks:
    """What rank 0 does for all: its result, or that it was fenced, is the same on every rank."""

    def __init__(self, store: BlockingStore) -> None:
        self.store = store
        # On the CPU even where gradients go over NCCL: a rank that waits for hours must not spin on a GPU.
        self.group = dist.new_group(backend="gloo", timeout=_PLAN_TIMEOUT)

    def together(self, work: Callable[[], _T]) -> _T:
        """`work` on rank 0 only. Raises FencedError on every rank where it did there."""
        box: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                box[0] = work()
            except FencedError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise FencedError(box[1])
        return box[0]  # type: ignore[no-any-return]

    def write(self, work: _Work[_T]) -> _T:
        return self.together(lambda: self.store.do(work))
