"""Hold calls while the store is unavailable, as they are held while no engine is ready.

A program in a box gives up a failed call after seconds, and its whole rollout with it; a call that waits costs its
body's memory and a connection. How many wait is limited, because a box is not trusted.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import structlog

from ratchet.background_task import start_process_task
from ratchet.errors import StoreUnavailableError
from store import adapters
from store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")
_PROBE_SECONDS = 0.3

_T = TypeVar("_T")


class TooManyHeldError(Exception):
    """More calls wait to begin than is allowed."""


class HeldCalls:
    """The calls that wait for the store or for their engine set before they have begun: their numbers by session, and
    their bodies' size.

    While the store is away, a token that was not seen before cannot be looked up; its calls, whose body is not read
    yet, count as those of one session. All such tokens together have half of the places, so that tokens that a box
    invents cannot take the places of sessions that are known.
    """

    def __init__(self, max_per_session: int, max_calls: int, max_bytes: int) -> None:
        self._max_per_session = max_per_session
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._by_session: Counter[int | bytes] = Counter()
        self._num_unknown = 0
        self._num_bytes = 0

    @contextlib.contextmanager
    def add(self, session: int | bytes, num_bytes: int) -> Iterator[None]:
        """Count a call while the block runs. `session`: its id, or a new token's digest. Raises TooManyHeldError."""
        unknown = isinstance(session, bytes)
        if (
            self._by_session[session] >= self._max_per_session
            or self._by_session.total() >= self._max_calls
            or (unknown and self._num_unknown >= (self._max_calls + 1) // 2)
            or self._num_bytes + num_bytes > self._max_bytes
        ):
            raise TooManyHeldError
        self._by_session[session] += 1
        self._num_unknown += unknown
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._by_session[session] -= 1
            self._num_unknown -= unknown
            self._num_bytes -= num_bytes
            if not self._by_session[session]:
                del self._by_session[session]


class StoreOutage:
    """The store's outages, as one process sees them. All calls wait for one probe, or they would crowd the store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_away(self) -> bool:
        """True if calls wait for the store now."""
        return self._probe is not None and not self._probe.done()

    async def hold(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns, repeated after each outage of the store.

        A commit whose confirmation was lost may have succeeded, so `work` must be safe to repeat.
        """
        while True:
            try:
                return await work()
            except StoreUnavailableError as error:
                if self._probe is None or self._probe.done():
                    _LOG.warning("the store is away, calls wait", reason=str(error))
                    self._probe = start_process_task(self._wait_until_available())
                await asyncio.shield(self._probe)

    async def _wait_until_available(self) -> None:
        while True:
            # Sleep first: a store without disk space answers the probe at once, and the calls would repeat without a
            # pause.
            await asyncio.sleep(_PROBE_SECONDS)
            with contextlib.suppress(StoreUnavailableError):
                async with self._database.begin() as conn:
                    await conn.exec_driver_sql("SELECT 1")
                return


async def heartbeat_adapter(database: Database, outage: StoreOutage, ready: Callable[[], bool]) -> None:
    """Write heartbeats from when calls can be answered on. Gaps above five seconds are not in agents' time budgets.

    While the store is unavailable, or a lock stops calls, no heartbeat is written, which is right: no call can be
    answered then. So `outage` knows of an outage also if no call is made. Never returns.
    """
    while not ready():
        await asyncio.sleep(0.2)
    while True:
        try:
            await outage.hold(lambda: database.run(adapters.heartbeat_adapters))
        except Exception:  # if this loop ended, the time budget of every agent would stop running
            _LOG.exception("heartbeat not recorded")
        await asyncio.sleep(adapters.BEAT_SECONDS)
