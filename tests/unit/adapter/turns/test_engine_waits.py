"""Waits are recorded after any error, and time without the store is not counted a second time as waiting."""

import asyncio

import pytest

from adapter.store_outage import StoreOutage
from adapter.turns import engine_waits
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from store.database import Database
from tests.standins.failing_database import FailingDatabase


class WatchedOutage(StoreOutage):
    """It counts how often it was asked while the store is away."""

    num_asked_away = 0

    @property
    def is_away(self) -> bool:
        away = super().is_away
        self.num_asked_away += away
        return away


async def test_no_wait_is_counted_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_waits, "_COUNT_SECONDS", 0.05)
    database = Database("postgresql://nobody@127.0.0.1:1/none")

    async def ask() -> None:
        async with database.begin():
            pass

    outage = WatchedOutage(database)
    held = asyncio.create_task(outage.hold(ask))
    waits = EngineWaits(database, EngineRouter(database), outage)
    try:
        async with asyncio.timeout(300):
            while not outage.is_away:
                await asyncio.sleep(0.01)
            waits.add(1, 1)
            asked = outage.num_asked_away
            while outage.num_asked_away < asked + 3:  # three rounds of the loop that counts
                await asyncio.sleep(0.01)
        assert waits.remove(1) == 0.0
    finally:
        waits.close()
        held.cancel()
        await database.close()


async def test_waits_are_recorded_after_any_error() -> None:
    """The loop ended before for the life of the process, and all later waits counted against the agents' time."""
    async with FailingDatabase("postgresql://nobody@127.0.0.1:1/none") as database, asyncio.timeout(60):
        database.num_failures = 2
        waits = EngineWaits(database, EngineRouter(database), StoreOutage(database))
        waits.add(1, 1)
        while database.num_begun < 3:
            await asyncio.sleep(0.05)
        waits.close()
