"""Which engine a call goes to: ready ones from the store, the same one for a session while it lives, waiting while there is none.

Why here: engines come, pause, die and return while agents talk; none of that may reach an agent.
Called by: `capture.py`.
"""

import asyncio
import time
from hashlib import blake2b

from engine.client import EngineClient
from ratchet.errors import StoreUnavailableError
from ratchet.store.database import Database
from ratchet.store.engines import SILENT_SECONDS, EngineRow, list_engines
from ratchet.types import EngineState

_REFRESH_SECONDS = 1.0
_POLL_SECONDS = 0.2
_AVOID_SECONDS = 2.0


class EngineRouter:
    """A view of the engines that is at most a second old, shared by all calls of the process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engines: dict[int, EngineRow] = {}
        self._read_at = float("-inf")
        self._blind_until = float("-inf")  # by then every living engine has been heard again since the store was away
        self._reading = asyncio.Lock()
        self._avoid: dict[int, float] = {}
        self._clients: dict[str, EngineClient] = {}

    async def pick(self, session_id: int) -> EngineRow:
        """Waits until an engine is ready. The choice is stable per session, so that the engine's prefix cache helps."""
        age = _REFRESH_SECONDS
        while True:
            await self._refresh(age)
            engine = self.likely(session_id)
            if engine is not None:
                return engine
            age = _POLL_SECONDS
            await asyncio.sleep(_POLL_SECONDS)

    def likely(self, session_id: int) -> EngineRow | None:
        """What `pick` would choose by the present view, None where it would wait."""
        now = time.monotonic()
        ready = [row for row in self._engines.values() if self.serves(row.id) and self._avoid.get(row.id, 0.0) < now]
        return max(
            ready, key=lambda row: blake2b(f"{session_id}/{row.id}".encode(), digest_size=8).digest(), default=None
        )

    def serves(self, engine_id: int) -> bool:
        """Whether the engine is ready, as far as is known now. A paused one holds its calls and goes on with them later."""
        row = self._engines.get(engine_id)
        return row is not None and row.state is EngineState.READY and row.silent_seconds < SILENT_SECONDS

    async def wait_until_gone(self, engine_id: int) -> None:
        """Returns once nobody speaks for the engine any more: its wrapper has been silent for long, or says that the server ends or begins.

        While the store is away no wrapper is heard: that silence says nothing about the engines, which go on generating.
        """
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            await self._refresh()
            row = self._engines.get(engine_id)
            if row is None or row.state in (EngineState.STARTING, EngineState.QUARANTINED):
                return
            if row.silent_seconds > SILENT_SECONDS and time.monotonic() > self._blind_until:
                return

    def avoid(self, engine_id: int) -> None:
        """The engine has just failed a call: others go first for a moment."""
        self._avoid[engine_id] = time.monotonic() + _AVOID_SECONDS
        self._read_at = float("-inf")

    def client(self, engine: EngineRow) -> EngineClient:
        if engine.address not in self._clients:
            self._clients[engine.address] = EngineClient(engine.address)
        return self._clients[engine.address]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _refresh(self, max_age_seconds: float = _REFRESH_SECONDS) -> None:
        async with self._reading:
            if time.monotonic() - self._read_at < max_age_seconds:
                return
            try:
                async with self._database.begin() as conn:
                    self._engines = {row.id: row for row in await list_engines(conn)}
            except StoreUnavailableError:
                self._blind_until = time.monotonic() + SILENT_SECONDS
                await asyncio.sleep(_POLL_SECONDS)  # the last view stands; a turn cannot be stored now anyway
                return
            self._read_at = time.monotonic()
