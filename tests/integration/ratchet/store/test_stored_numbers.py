"""A run with numbers that earlier versions accepted, and that no integer holds, is polled, listed and ended."""

import pytest
from sqlalchemy import update

from ratchet.errors import ConfigError
from ratchet.store import box_cap, learner_commits, learners, reports, runs, steering
from ratchet.store.database import Database
from ratchet.store.learners import NextStep
from ratchet.store.schema import RunTable
from ratchet.store.steering import Request
from ratchet.store.views import run_views
from ratchet.types import RunState
from tests.integration.training.records import make_config, make_run


@pytest.mark.parametrize("number", [2**31, 2**40, 2**70, -(2**70)])
async def test_one_run_does_not_fail_what_reads_all_runs(database: Database, run_id: str, number: int) -> None:
    config = make_config().model_dump(mode="json")
    await make_run(database, run_id, make_config())
    await make_run(database, f"{run_id}-other", make_config())
    config["training"]["steps"] = config["sandbox"]["max_boxes"] = number
    async with database.begin() as connection:
        row = RunTable.run_id == run_id
        await connection.execute(update(RunTable).where(row).values(config=config, box_cap=1))
        is_endless = number > 0
        wanting = await learners.runs_wanting_learner(connection)
        assert set(wanting) == {f"{run_id}-other"} | ({run_id} if is_endless else set())
        known = 2**31 - 1 if is_endless else 1 - 2**31
        assert {one["run_id"]: one["steps"] for one in await reports.list_runs(connection)}[run_id] == known
        assert {one.run_id: one.num_steps for one in await run_views.list_run_summaries(connection, 10)}[
            run_id
        ] == known
        assert [one.max_boxes for one in await box_cap.open_caps(connection)] == [known]
        lease = await learner_commits.take_lease(connection, run_id)
        step = await learners.next_step(connection, run_id, lease.epoch, 1)
        assert step is (NextStep.UNPLANNED if is_endless else NextStep.NONE)
        if is_endless:
            stored = await runs.get_run(connection, run_id)
            assert stored is not None and stored.resolved_config.training.steps == known
        assert await runs.end_run(connection, run_id, RunState.STOPPED, "", None)


@pytest.mark.parametrize("number", [2**31 - 6, 2**33, 2**70])
async def test_a_run_is_not_extended_beyond_what_can_be_stored(database: Database, run_id: str, number: int) -> None:
    await make_run(database, run_id, make_config())
    with pytest.raises(ConfigError, match=r"training\.steps: Input should be less than or equal to 2147483647"):
        async with database.begin() as connection:
            await steering.record_extension(connection, Request(run_id, "1", "a test"), number)
    async with database.begin() as connection:
        answer = await steering.record_extension(connection, Request(run_id, "1", "a test"), 2**31 - 7)
        assert "2147483647 steps now" in answer.text
        assert run_id in await learners.runs_wanting_learner(connection)
