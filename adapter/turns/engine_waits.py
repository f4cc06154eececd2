"""Record the time that calls wait for an engine or for the store, about once per second.

It is not counted in the agent's time budget. Waiting for an engine is time without one or with a paused one. A call
waits for the store if an access takes longer than `_LONG_SECONDS`: another transaction has locked its session or turn,
or this process alone has lost the store. If no adapter reaches the store, none sends a heartbeat either, which is not
counted in the budget (`store.adapters`); what overlaps counts once. A session waits while any of its calls
does, so that concurrent sub-agents do not count the same second twice.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog

from adapter.store_outage import StoreOutage
from adapter.turns.routing import EngineRouter
from ratchet.background_task import start_process_task
from store import sessions
from store.database import Database
from store.sessions import EngineWait

_LOG = structlog.get_logger("ratchet.adapter")
_COUNT_SECONDS = sessions.WAITS_RECORDED_SECONDS
_LONG_SECONDS = 5.0
"""An access that takes longer counts as waiting, as with a gap in the heartbeats; a healthy store takes milliseconds.
"""


@dataclass(slots=True)
class _GeneratingTurn:
    session_id: int
    engine_id: int | None = None
    forwarded: bool = False
    waited_seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class _StoringCall:
    session_id: int
    began_at: datetime


class EngineWaits:
    def __init__(self, database: Database, router: EngineRouter, outage: StoreOutage) -> None:
        self._database = database
        self._router = router
        self._outage = outage
        self._generating: dict[int, _GeneratingTurn] = {}
        self._storing: dict[object, _StoringCall] = {}
        self._unstored: dict[int, list[EngineWait]] = {}  # by session
        self._task: asyncio.Task[None] | None = None

    def add(self, turn_id: int, session_id: int) -> None:
        """Count the time that this turn waits from now on."""
        self._generating[turn_id] = _GeneratingTurn(session_id)
        self._begin()

    def _begin(self) -> None:
        if self._task is None:
            self._task = start_process_task(self._count())
            self._task.add_done_callback(_log_failure)

    @contextlib.contextmanager
    def storing(self, session_id: int) -> Iterator[None]:
        """Count the block as waiting if it takes long, also while it lasts."""
        key = object()
        began_at = datetime.now(UTC)
        self._storing[key] = _StoringCall(session_id, began_at)
        self._begin()
        try:
            yield
        finally:
            del self._storing[key]
            self.note_access(session_id, began_at)

    def note_access(self, session_id: int, began_at: datetime) -> None:
        """Count an access to the store that has taken until now, if that is long."""
        now = datetime.now(UTC)
        if (now - began_at).total_seconds() > _LONG_SECONDS:
            self._begin()
            self._note(session_id, EngineWait(began_at, now))

    def set_engine(self, turn_id: int, engine_id: int | None) -> None:
        """Record the engine that works on the call; None: the call waits for one."""
        if turn_id in self._generating:
            self._generating[turn_id].engine_id = engine_id

    def set_forwarded(self, turn_id: int, forwarded: bool) -> None:
        """Record whether an endpoint works on the call."""
        if turn_id in self._generating:
            self._generating[turn_id].forwarded = forwarded

    def credit(self, turn_id: int, seconds: float) -> None:
        """Count the time of a try that failed as waiting, too."""
        if (turn := self._generating.get(turn_id)) is not None:
            turn.waited_seconds += seconds
            now = datetime.now(UTC)
            self._note(turn.session_id, EngineWait(now - timedelta(seconds=seconds), now))

    def remove(self, turn_id: int) -> float:
        """Return the seconds that the call has waited, and count no more."""
        turn = self._generating.pop(turn_id, None)
        return 0.0 if turn is None else turn.waited_seconds

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _count(self) -> None:
        last = datetime.now(UTC)
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            now = datetime.now(UTC)
            if not self._outage.is_away and now > last:  # the clock may have been set back
                self._add(EngineWait(last, now))
            last = now
            for call in self._storing.values():
                self.note_access(call.session_id, call.began_at)
            if not self._unstored:
                continue
            taken = self._unstored
            self._unstored = {}  # for what is noted meanwhile
            stored: set[int] = set()
            try:
                stored = await self._database.run(sessions.add_engine_waits, taken)
            except Exception as error:  # any: without this loop, waits count against the agents' time
                _LOG.warning("waits for an engine not recorded yet", reason=repr(error))
                stored = set()  # its commit may have failed
                last = datetime.now(UTC)  # the attempt may have taken as long as the outage
            for session_id in taken.keys() - stored:
                self._unstored[session_id] = taken[session_id] + self._unstored.get(session_id, [])

    def _add(self, wait: EngineWait) -> None:
        waiting: set[int] = set()
        for turn in self._generating.values():
            is_served = turn.engine_id is not None and self._router.serves(turn.engine_id)
            if not turn.forwarded and not is_served:
                turn.waited_seconds += (wait.ended_at - wait.began_at).total_seconds()
                waiting.add(turn.session_id)
        for session_id in waiting:
            self._note(session_id, wait)

    def _note(self, session_id: int, wait: EngineWait) -> None:
        waits = self._unstored.setdefault(session_id, [])
        if waits and waits[-1].began_at <= wait.began_at <= waits[-1].ended_at <= wait.ended_at:
            waits[-1] = EngineWait(waits[-1].began_at, wait.ended_at)
        else:
            waits.append(wait)


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Log the loop's failure, after which waits count against the agents' time although calls still complete."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("waits for an engine are no longer recorded", exc_info=error)
