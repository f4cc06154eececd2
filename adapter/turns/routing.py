"""Choose the engine of a call: a ready one of the session's engine set, the same one for a session while the ready
engines stay the same.

Wait while there is none, also if other sets have ready ones: their engines have the weights of other runs.

Engines are added, paused, killed and replaced while agents run, and no agent may see that.
"""

import asyncio
import time
from hashlib import blake2b

from engine.client import EngineClient
from ratchet.errors import StoreUnavailableError
from ratchet.types import EngineState
from store.database import Database
from store.engines import SILENT_SECONDS, EngineRow, list_all_engines
from store.sessions import SessionRow

_REFRESH_SECONDS = 1.0
_POLL_SECONDS = 0.2
_AVOID_SECONDS = 2.0


class EngineRouter:
    """The engines as last read, for all calls of the process; only `pick` and `wait_until_gone` read anew."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engines: dict[int, EngineRow] = {}
        self._read_at = float("-inf")
        # After the store was unavailable, each living engine has sent a heartbeat again by this time.
        self._heartbeats_unknown_until = float("-inf")
        self._refreshing = asyncio.Lock()
        self._avoided_until: dict[int, float] = {}
        self._clients: dict[str, EngineClient] = {}

    async def pick(self, session: SessionRow) -> EngineRow:
        """Wait for a ready engine of the session's set; the same one per session, for the engine's prefix cache."""
        max_age_seconds = _REFRESH_SECONDS
        while True:
            await self._refresh(max_age_seconds)
            engine = self.likely(session)
            if engine is not None:
                return engine
            max_age_seconds = _POLL_SECONDS
            await asyncio.sleep(_POLL_SECONDS)

    def likely(self, session: SessionRow) -> EngineRow | None:
        """The engine that `pick` would choose by what is known now; None if it would wait."""
        now = time.monotonic()
        of_set = [row for row in self._engines.values() if row.engine_set == session.engine_set]
        ready = [row for row in of_set if self.serves(row.id) and self._avoided_until.get(row.id, 0.0) < now]
        return max(
            ready, key=lambda row: blake2b(f"{session.id}/{row.id}".encode(), digest_size=8).digest(), default=None
        )

    def serves(self, engine_id: int) -> bool:
        """Return whether the engine was ready when last read. A paused one is not; it continues its calls later."""
        row = self._engines.get(engine_id)
        return row is not None and row.state is EngineState.READY and row.silent_seconds < SILENT_SECONDS

    async def wait_until_gone(self, engine_id: int) -> None:
        """Return when the engine can no longer finish its calls.

        It has sent no heartbeat for long, its server has ended or starts anew, or its weights were not verified
        (`quarantined`), so that it will be restarted.

        Time without heartbeats because the store is unavailable does not count: the engines go on generating.
        """
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            await self._refresh()
            row = self._engines.get(engine_id)
            if row is None or row.state in (EngineState.STARTING, EngineState.QUARANTINED):
                return
            if row.silent_seconds > SILENT_SECONDS and time.monotonic() > self._heartbeats_unknown_until:
                return

    def avoid(self, engine_id: int) -> None:
        """Do not choose this engine for two seconds, because it has just failed a call."""
        self._avoided_until[engine_id] = time.monotonic() + _AVOID_SECONDS
        self._read_at = float("-inf")

    def client(self, engine: EngineRow) -> EngineClient:
        if engine.address not in self._clients:
            self._clients[engine.address] = EngineClient(engine.address)
        return self._clients[engine.address]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _refresh(self, max_age_seconds: float = _REFRESH_SECONDS) -> None:
        async with self._refreshing:
            if time.monotonic() - self._read_at < max_age_seconds:
                return
            try:
                self._engines = {row.id: row for row in await self._database.read(list_all_engines)}
            except StoreUnavailableError:
                self._heartbeats_unknown_until = time.monotonic() + SILENT_SECONDS
                await asyncio.sleep(_POLL_SECONDS)  # keep the last view; a turn cannot be stored now anyway
                return
            self._read_at = time.monotonic()
