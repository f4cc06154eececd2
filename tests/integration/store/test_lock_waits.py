"""The holder of a lock is named, with what it did last, and how many statements wait for it."""

import asyncio

from store.database import Database
from store.lock_waits import LockWait, longest_lock_wait


async def test_the_holder_is_named_and_not_those_that_wait(database: Database) -> None:
    async def count_turns() -> None:
        async with database.begin() as connection:
            await connection.exec_driver_sql("SELECT count(*) FROM turn")

    async def found() -> LockWait | None:
        async with database.begin() as connection:
            return await longest_lock_wait(connection, over_seconds=0.0)

    assert await found() is None
    async with database.begin() as holder:
        await holder.exec_driver_sql("LOCK TABLE turn IN ACCESS EXCLUSIVE MODE")
        pid = (await holder.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
        waiting = [asyncio.create_task(count_turns()) for _ in range(2)]
        async with asyncio.timeout(30):
            while (wait := await found()) is None or wait.num_waiting < 2:
                await asyncio.sleep(0.05)
        assert (wait.pid, wait.state) == (pid, "idle in transaction")
        assert f"pg_terminate_backend({pid})" in wait.sentence()
    await asyncio.gather(*waiting)
    assert await found() is None
