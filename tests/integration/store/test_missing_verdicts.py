"""Missing verdicts pause a run: the queries on real rows. The statistics are in tests/unit/store."""

from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database
from store.missing_verdicts import NO_VERDICT_SHARE, reason_to_pause, recent_groups
from store.open_runs import resume_run
from store.schema import RolloutGroupTable, RunTable
from tests.integration.training.records import make_config, make_group, make_run

FAILED: dict[str, Any] = {"outcome": "grader_failed", "reward": None}


async def make_one_task(connection: AsyncConnection) -> None:
    """Make all groups those of one task."""
    first = select(func.min(RolloutGroupTable.task_id)).scalar_subquery()
    await connection.execute(update(RolloutGroupTable).values(task_id=first))


async def test_too_many_missing_verdicts_pause_a_run(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        assert await reason_to_pause(connection, run_id) == ""
        await make_group(connection, run_id, 0, [0.0] * 40, members=[FAILED] * 2)
        assert await reason_to_pause(connection, run_id) == "", "two of forty may be chance"
        await make_group(connection, run_id, 1, [0.0] * 40, members=[FAILED] * 4)
        reason = await reason_to_pause(connection, run_id)
    assert "6 of the newest 80 rollouts got no verdict" in reason and NO_VERDICT_SHARE == 0.02


async def test_what_is_counted_of_a_group(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    lost = {"outcome": "infra_failed", "reward": None}
    async with database.begin() as connection:
        await make_group(connection, run_id, 30, [1.0, 0.0, 1.0, 0.0])
        await make_group(connection, run_id, 24, [9.0, 0.0, 1.0, 0.5], members=[FAILED])
        await make_group(connection, run_id, 26, [9.0, 9.0, 1.0, 0.0], members=[FAILED, lost])
        await make_group(connection, run_id, 31, [1.0, 1.0, 1.0, 1.0])
        still_open = update(RolloutGroupTable).where(RolloutGroupTable.group_no == 31).values(state="open")
        await connection.execute(still_open)
        found = await recent_groups(connection, run_id)
    counted = [(one.group_no, one.num_missing, one.mean_reward) for one in found]
    assert counted == [(24, 1, 0.5), (30, 0, 2 / 3)], "26 has too few rewards to compare"


async def test_missing_verdicts_of_failures_pause_a_run_until_it_is_resumed(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        for number in range(50):
            hard = number % 5 == 0
            await make_group(connection, run_id, number, [0.0 if hard else 1.0] * 4, members=[FAILED] * hard)
        reason = await reason_to_pause(connection, run_id)
        assert "10 of the newest 200 rollouts got no verdict" in reason
        for number in range(50, 160):
            await make_group(connection, run_id, number, [1.0, 1.0, 0.0, 1.0])
        reason = await reason_to_pause(connection, run_id)
        assert "in groups of 10 tasks" in reason and "mean reward of 0.00, and of 0." in reason, reason
        async with connection.begin_nested() as changed:
            await make_one_task(connection)
            assert await reason_to_pause(connection, run_id) == "", "one hard task may have flaky tests"
            await changed.rollback()
        await connection.execute(update(RunTable).values(state="paused", next_group_no=160))
        await resume_run(connection, run_id)
        assert await reason_to_pause(connection, run_id) == "", "what a person has seen does not pause the run again"
