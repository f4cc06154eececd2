"""The clock of the database's host is set back by an hour: what is silent is noticed at once, what lives goes on.

Rows whose times are moved ahead by an hour are what such a jump leaves.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import func, insert, select, update

from store import box_cap, learners
from store.database import Database
from store.schema import LearnerTable, RunTable
from tests.integration.store.test_box_cap import adapt, lower
from tests.integration.training.records import make_config, make_run

JUMP = timedelta(hours=1)


async def set_back(database: Database, *columns: Any) -> None:
    """Leave these columns as they are if the clock is set back by an hour."""
    async with database.begin() as connection:
        for column in columns:
            await connection.execute(update(column.class_).values({column.key: column + JUMP}))


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
