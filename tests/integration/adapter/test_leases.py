"""A process's lease and outages of the store."""

import asyncio

from sqlalchemy import literal, select

from adapter.turns.leases import ProcessLease
from store.adapters import process_lives
from store.database import Database
from tests.integration.adapter.conftest import cut_off
from tests.standins.failing_database import FailingDatabase


async def lives(database: Database) -> bool:
    async with database.begin() as conn:
        return bool((await conn.execute(select(process_lives(literal("me"))))).scalar_one())


async def test_a_lease_that_expired_in_an_outage_is_renewed_before_a_row_names_it(
    postgres_url: str, database: Database
) -> None:
    async with cut_off(postgres_url) as (url, line), Database(url) as behind_line:
        lease = ProcessLease(behind_line, "me", 3.0)
        await lease.begin()
        assert await lives(database)
        line.cut()
        async with asyncio.timeout(300):
            while await lives(database):
                await asyncio.sleep(0.05)
        line.mend()
        await lease.begin()
        assert await lives(database)
        await lease.close()
        assert not await lives(database)


async def test_a_lease_is_renewed_after_any_error(postgres_url: str, database: Database) -> None:
    """The loop ended before for the life of the process, whose calls other processes then took over."""
    async with FailingDatabase(postgres_url) as failing, asyncio.timeout(60):
        lease = ProcessLease(failing, "me", 0.9)
        await lease.begin()
        failing.num_failures = 4
        while failing.num_begun < 6 or not await lives(database):  # the first began the lease
            await asyncio.sleep(0.05)
        await lease.close()
