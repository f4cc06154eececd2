"""The runtime of a learner's rank: its settings, transactions on Postgres, heartbeats and agreement between ranks.

Threads, database outages and collectives are handled here, so that `training/train_loop.py` reads as the steps of
training.
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
from typing import Any, TypeVar, TypeVarTuple

import structlog
import torch.distributed as dist
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.background_task import errors_logged
from ratchet.errors import FencedError, StoreUnavailableError, WeightStorageError
from store import learner_commits, learners
from store.database import Database
from store.learner_commits import RunLease
from training.metric_sinks.fan_out import MetricSinks

_LOG = structlog.get_logger()

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_HEARTBEAT_SECONDS = 5.0
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0
_PLAN_TIMEOUT = timedelta(days=30)
"""Time limit of a collective in which ranks wait for rank 0, which waits for rollouts.

A rank that has died is noticed earlier, by its closed connection.
"""


@dataclass(slots=True, frozen=True)
class RankSettings:
    """Settings of a rank; everything else is read from Postgres.

    `policies` and `checkpoints` are root directories, below which every run has its own. `metrics` is the directory in
    which each metric sink has one, None to feed no sinks. `num_threads`: compute threads of a rank on a CPU.
    """

    run_id: str
    database_url: str
    policies: Path
    checkpoints: Path
    num_threads: int = 1
    metrics: Path | None = None


class BlockingStore:
    """Transactions for a thread without an event loop; waits while Postgres is unavailable."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.database = Database(url, pool_size=1)

    def transaction(self, work: Callable[[AsyncConnection, *_Args], Awaitable[_T]], *args: *_Args) -> _T:
        """Run `work` in a transaction until it is known to have committed; running it again must change nothing."""
        delay = 0.2
        while True:
            try:
                return self._runner.run(self.database.run(work, *args))
            except StoreUnavailableError as error:
                _LOG.warning("waiting for postgres", reason=str(error)[:200])
                time.sleep(delay)
                delay = min(delay * 2, 5.0)

    def close(self) -> None:
        self._runner.run(self.database.close())
        self._runner.close()


class HeartbeatThread:
    """Writes the learner's row every five seconds from its own thread, so that a long step is no crash."""

    def __init__(self, settings: RankSettings, lease: RunLease, world_size: int) -> None:
        self.settings = settings
        self.lease = lease
        self.world_size = world_size
        self.phase = learners.LOADING_MODEL
        self.step = lease.step
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def set_phase(self, phase: str, step: int) -> None:
        """Report what the learner does now; written at once. Has no effect while the thread does not run."""
        self.phase = phase
        self.step = step
        self._changed.set()

    def _run(self) -> None:
        store = BlockingStore(self.settings.database_url)
        last = False
        while not last:
            self._changed.clear()
            last = self._stopped.is_set()
            with errors_logged("heartbeat not written"):  # a learner without heartbeats is taken for dead
                store.transaction(self._write)
            if not last:
                self._changed.wait(_HEARTBEAT_SECONDS)
        store.close()

    async def _write(self, connection: AsyncConnection) -> bool:
        details = {"pid": os.getpid()}
        return await learners.heartbeat_learner(
            connection, self.lease.run_id, self.lease.epoch, self.world_size, self.phase, self.step, details
        )

    @contextlib.contextmanager
    def running(self, enabled: bool) -> Iterator[None]:
        """Run the thread during the block, with a last heartbeat at its end. `enabled` is True on rank 0 only."""
        if not enabled:
            yield
            return
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._changed.set()
            self._thread.join(timeout=10)


class Ranks:
    """Agreement between ranks: rank 0 acts, and every rank gets its result or its FencedError."""

    def __init__(self, store: BlockingStore) -> None:
        self.store = store
        # gloo, even if gradients use NCCL: a rank that waits for hours must not poll on a GPU.
        self._group = dist.new_group(backend="gloo", timeout=_PLAN_TIMEOUT)

    def on_rank_zero(self, work: Callable[[], _T]) -> _T:
        """Run `work` on rank 0 and return its result on every rank. A FencedError is raised on every rank."""
        box: list[Any] = [None, None]  # the result, the reason of a FencedError
        if dist.get_rank() == 0:
            try:
                box[0] = work()
            except FencedError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, group=self._group)
        if box[1] is not None:
            raise FencedError(box[1])
        return box[0]  # type: ignore[no-any-return]

    def transaction(self, work: Callable[[AsyncConnection, *_Args], Awaitable[_T]], *args: *_Args) -> _T:
        """Run a transaction on rank 0 and return its result on every rank."""
        return self.on_rank_zero(lambda: self.store.transaction(work, *args))


def lost_peer(error: Exception) -> bool:
    """Return whether a collective failed because another rank ended, which is no fault of this rank.

    Gloo reports it by a RuntimeError that names gloo's source files.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@dataclass(slots=True, frozen=True)
class RankContext:
    """The objects that the training loop of a rank and its writers share.

    `after_point(point, step)` is called after each named point of the loop; fault tests end the process there.
    """

    settings: RankSettings
    lease: RunLease
    ranks: Ranks
    heartbeat: HeartbeatThread
    sinks: MetricSinks
    after_point: Callable[[str, int], None]

    @property
    def store(self) -> BlockingStore:
        return self.ranks.store

    def when_storage_answers(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, after trying again for as long as the storage of weights is unavailable.

        The learner's phase says what it waits for. Raises FencedError if another learner has taken over meanwhile.
        """
        phase, step = self.heartbeat.phase, self.heartbeat.step
        delay = _FIRST_WAIT_SECONDS
        while True:
            try:
                found = work()
                self.heartbeat.set_phase(phase, step)
                return found
            except WeightStorageError as error:
                _LOG.warning("waiting for the storage of weights", reason=str(error))
                self.heartbeat.set_phase(f"{phase} (waits for {error}) at step", step)
            self.store.transaction(learner_commits.hold_lease, self.lease)
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_WAIT_SECONDS)
