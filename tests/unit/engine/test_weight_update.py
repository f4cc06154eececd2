"""The lease of an update's pause is renewed after any error."""

import asyncio

import pytest

from engine import weight_update
from ratchet.background_task import running_beside
from ratchet.types import EngineState
from store.engines import EngineRow
from tests.standins.failing_database import FailingDatabase


async def test_a_lease_is_tried_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update, "PAUSE_SECONDS", 0.04)
    engine = EngineRow(1, "http://127.0.0.1:1", EngineState.SYNCING, None, "", 0.0, 1.0)
    async with FailingDatabase("postgresql://127.0.0.1:1/none") as database, asyncio.timeout(60):
        database.num_failures = 2
        async with running_beside(weight_update._renew_lease(database, engine)):
            while database.num_begun < 3:
                await asyncio.sleep(0.01)
