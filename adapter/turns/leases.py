"""Renew the leases of this process's turns and record the time that they wait for an engine, about once per second.

One statement serves all calls of the process. Waiting is time without an engine or with a paused one; it is not counted
in the agent's time budget. A session waits while any of its calls does, so that concurrent sub-agents do not count the
same second twice.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog

from adapter.turns.routing import EngineRouter
from ratchet.errors import StoreUnavailableError
from ratchet.store import sessions, turns
from ratchet.store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")


@dataclass(slots=True)
class _LeasedTurn:
    session_id: int
    generating: bool = True
    engine_id: int | None = None
    waited_seconds: float = 0.0


class Leases:
    def __init__(self, database: Database, lease_seconds: float, router: EngineRouter) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._router = router
        self._leased: dict[int, _LeasedTurn] = {}
        self._unstored_waits: dict[int, float] = {}  # seconds by session
        self._task: asyncio.Task[None] | None = None

    def add(self, turn_id: int, session_id: int) -> None:
        """Renew this turn's lease from now on. The row has a lease already."""
        self._leased[turn_id] = _LeasedTurn(session_id)
        if self._task is None:
            self._task = asyncio.create_task(self._renew())
            self._task.add_done_callback(_log_failure)

    def set_engine(self, turn_id: int, engine_id: int | None) -> None:
        """Record the engine that works on the call; None: the call waits for one, and the waiting time is counted."""
        if turn_id in self._leased:
            self._leased[turn_id].engine_id = engine_id

    def finish_generation(self, turn_id: int) -> float:
        """Return the seconds that the call has waited, and count no more. The lease is still renewed."""
        leased = self._leased.get(turn_id)
        if leased is None:
            return 0.0
        leased.generating = False
        return leased.waited_seconds

    def remove(self, turn_id: int) -> None:
        """Stop renewing: the answer was delivered, or no client waits for it."""
        self._leased.pop(turn_id, None)

    async def close(self) -> None:
        """End all leases now, so that another process need not wait until they expire."""
        turn_ids = list(self._leased)
        if self._task is not None:
            self._task.cancel()
        if turn_ids:
            try:
                async with self._database.begin() as conn:
                    await turns.release_leases(conn, turn_ids)
            except StoreUnavailableError as error:
                _LOG.warning("leases not released, they will expire", reason=str(error))

    async def _renew(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._lease_seconds / 3))
            now = time.monotonic()
            self._count_waits(now - last)
            last = now
            try:
                if self._leased:
                    async with self._database.begin() as conn:
                        await turns.renew_leases(conn, list(self._leased), self._lease_seconds)
                # A transaction of its own: completing a turn locks the session before the turn, the reverse order would
                # deadlock.
                if self._unstored_waits:
                    async with self._database.begin() as conn:
                        stored = await sessions.add_engine_wait(conn, self._unstored_waits)
                    for session_id in stored:
                        del self._unstored_waits[session_id]
            except StoreUnavailableError as error:
                _LOG.warning("leases not renewed", reason=str(error))

    def _count_waits(self, seconds: float) -> None:
        waiting: set[int] = set()
        for leased in self._leased.values():
            if leased.generating and (leased.engine_id is None or not self._router.serves(leased.engine_id)):
                leased.waited_seconds += seconds
                waiting.add(leased.session_id)
        for session_id in waiting:
            self._unstored_waits[session_id] = self._unstored_waits.get(session_id, 0.0) + seconds


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Log the loop's failure, after which every lease expires although calls still complete."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("leases are no longer renewed", exc_info=error)
