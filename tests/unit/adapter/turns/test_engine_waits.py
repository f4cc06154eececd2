"""Waits are recorded after any error, and time without the store is not counted a second time as waiting."""

import asyncio

from adapter.store_outage import StoreOutage
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from store.database import Database
from tests.standins.failing_database import FailingDatabase


async def test_no_wait_is_counted_while_the_store_is_away() -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/none")

    async def ask() -> None:
        async with database.begin():
            pass

    outage = StoreOutage(database)
    held = asyncio.create_task(outage.hold(ask))
    waits = EngineWaits(database, EngineRouter(database), outage)
    try:
        async with asyncio.timeout(300):
            while not outage.is_away:
                await asyncio.sleep(0.01)
        waits.add(1, 1)
        await asyncio.sleep(1.5)  # gives a wrong implementation the time to count
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
