"""The calls that this process works on, said to the store every second or two: leases renewed, waiting seconds added.

Why here: it is the only background loop of the adapter, and one statement for all calls instead of one for each.
Called by: `capture.py`.

Waiting is what an agent's budget must not pay for: no engine, or an engine that is paused. A session waits while any of its calls
does, so that concurrent sub-agents do not count the same second twice.
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
class _Held:
    session_id: int
    generating: bool = True
    engine_id: int | None = None
    waited_seconds: float = 0.0


class Leases:
    def __init__(self, database: Database, lease_seconds: float, router: EngineRouter) -> None:
        self._database, self._lease_seconds, self._router = database, lease_seconds, router
        self._held: dict[int, _Held] = {}
        self._waits: dict[int, float] = {}  # by session, in seconds, not yet stored
        self._task: asyncio.Task[None] | None = None

    def hold(self, turn_id: int, session_id: int) -> None:
        self._held[turn_id] = _Held(session_id)
        if self._task is None:
            self._task = asyncio.create_task(self._renew())
            self._task.add_done_callback(_report)

    def runs_on(self, turn_id: int, engine_id: int | None) -> None:
        if turn_id in self._held:
            self._held[turn_id].engine_id = engine_id

    def waited(self, turn_id: int) -> float:
        """Seconds waited so far; the call does not wait from now on."""
        held = self._held.get(turn_id)
        if held is None:
            return 0.0
        held.generating = False
        return held.waited_seconds

    def drop(self, turn_id: int) -> None:
        """The call is over, or nobody waits for its answer any more."""
        self._held.pop(turn_id, None)

    async def close(self) -> None:
        """Ends all leases now, so that another process need not wait for them to run out."""
        held = list(self._held)
        if self._task is not None:
            self._task.cancel()
        if held:
            try:
                async with self._database.begin() as conn:
                    await turns.release_leases(conn, held)
            except StoreUnavailableError as error:
                _LOG.warning("leases not released, they will run out", reason=str(error))

    async def _renew(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._lease_seconds / 3))
            now = time.monotonic()
            self._count(now - last)
            last = now
            try:
                if self._held:
                    async with self._database.begin() as conn:
                        await turns.renew_leases(conn, list(self._held), self._lease_seconds)
                if self._waits:  # a transaction of its own: completing a turn locks the session first and the turn then
                    async with self._database.begin() as conn:
                        stored = await sessions.add_engine_wait(conn, self._waits)
                    for session_id in stored:
                        del self._waits[session_id]
            except StoreUnavailableError as error:
                _LOG.warning("leases not renewed", reason=str(error))

    def _count(self, seconds: float) -> None:
        waiting: set[int] = set()
        for held in self._held.values():
            if held.generating and (held.engine_id is None or not self._router.serves(held.engine_id)):
                held.waited_seconds += seconds
                waiting.add(held.session_id)
        for session_id in waiting:
            self._waits[session_id] = self._waits.get(session_id, 0.0) + seconds


def _report(task: "asyncio.Task[None]") -> None:
    """Without this loop every lease runs out; calls still end well, but the cause must not stay hidden."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("leases are renewed no more", exc_info=error)
