"""The clock of the database's host is set back by an hour: what is silent is noticed at once, what lives goes on.

Rows whose times are moved ahead by an hour are what such a jump leaves.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import func, insert, literal, select, update

from ratchet.types import EngineState
from store import adapters, box_cap, engines, learners
from store.database import Database
from store.schema import AdapterProcessTable, EngineTable, InstallationTable, LearnerTable, RunTable
from tests.integration.store.test_box_cap import adapt, lower
from tests.integration.training.records import make_config, make_run

JUMP = timedelta(hours=1)


async def set_back(database: Database, *columns: Any) -> None:
    """Leave these columns as they are if the clock is set back by an hour."""
    async with database.begin() as connection:
        for column in columns:
            await connection.execute(update(column.class_).values({column.key: column + JUMP}))


async def test_what_died_ends_a_minute_after_the_next_heartbeat_of_an_adapter(database: Database) -> None:
    async def lives(process_id: str) -> bool:
        async with database.begin() as connection:
            return bool((await connection.execute(select(adapters.process_lives(literal(process_id))))).scalar_one())

    async def later(column: Any, by: timedelta) -> None:
        async with database.begin() as connection:
            await connection.execute(update(column.class_).values({column.key: column - by}))

    engine_id = await database.run(engines.register_engine, "a", "m", {})
    await database.run(engines.set_engine_state, engine_id, EngineState.STARTING, EngineState.READY)
    for process_id in ("died", "living"):
        await database.run(adapters.renew_process_lease, process_id, 20.0)
    await database.run(adapters.heartbeat_adapters)
    ahead = (AdapterProcessTable.alive_until, EngineTable.heartbeat_at, InstallationTable.adapter_seen_at)
    await set_back(database, *ahead)
    await database.run(adapters.heartbeat_adapters)
    for column in ahead:
        await later(column, timedelta(seconds=61))
    await database.run(adapters.renew_process_lease, "living", 20.0)
    assert [await lives(one) for one in ("died", "living")] == [False, True]
    assert await database.run(engines.ready_engines, "default") == []
    await database.run(engines.heartbeat_engine, engine_id)
    assert [row.id for row in await database.run(engines.ready_engines, "default")] == [engine_id]


async def test_a_silent_learner_is_seen_and_its_next_heartbeat_ends_that(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())

    async def silent() -> float:
        found = await database.run(learners.get_learner, run_id)
        assert found is not None
        return found.silent_seconds

    async def beat() -> None:
        async with database.begin() as connection:
            assert await learners.heartbeat_learner(connection, run_id, 0, 1, learners.WAITING, 1, {})

    await beat()
    await set_back(database, LearnerTable.heartbeat_at)
    assert await silent() > 3000
    await beat()
    assert await silent() < 60


async def test_the_limit_of_boxes_is_adapted_meanwhile(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    await lower(database, run_id, 8)
    async with database.begin() as connection:
        rows = [{"provider": "p", "attempt": 1, "workflow_id": "w", "image": "i", "state": "live", "role": "agent"}] * 8
        await connection.execute(insert(box_cap.SandboxTable), rows)
    assert await adapt(database, run_id) == 8, "it has just changed"
    await set_back(database, RunTable.box_cap_at)
    assert await adapt(database, run_id) > 8
    async with database.begin() as connection:
        ahead = select(RunTable.box_cap_at > func.now()).where(RunTable.run_id == run_id)
        assert not (await connection.execute(ahead)).scalar_one()
