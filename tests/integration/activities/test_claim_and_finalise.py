"""A rollout is ended by the workflow run that owns it, not by an earlier life of its workflow."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import event, insert, select, update
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.claim_and_finalise import RolloutRecordActivities
from activities.group_members import GroupRecordActivities
from activities.run_configs import RunConfigs
from ratchet.errors import FencedError
from ratchet.payloads import FinaliseInput, GroupInput, MemberInput, RolloutInput, RolloutResult
from ratchet.storable_values import storable_text
from ratchet.temporal_settings import load_temporal_settings
from store import grades, rollouts
from store.arrays import pack_text
from store.database import Database
from store.grades import NewGrade
from store.rollouts import NewPatch
from store.schema import AttemptTable, RolloutTable
from tests.integration.training.records import make_config, make_group, make_run


def life(name: str, workflow_id: str) -> ActivityEnvironment:
    """Run activities as those of the run `name` of a workflow."""
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, workflow_run_id=name, workflow_id=workflow_id)
    return environment


async def workflow_of(database: Database, rollout_id: int) -> str:
    async with database.begin() as connection:
        found = select(RolloutTable.workflow_id).where(RolloutTable.id == rollout_id)
        return str((await connection.execute(found)).scalar_one())


@pytest.fixture
async def activities(database: Database, run_id: str, model: Path) -> RolloutRecordActivities:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await make_group(connection, run_id, 0, [0.0, 1.0])
        await connection.execute(update(RolloutTable).values(outcome=None, reward=None))
    settings = load_temporal_settings()
    return RolloutRecordActivities(database, settings, RunConfigs(database, settings))


async def graded(database: Database, rollout_id: int, attempt: int) -> int:
    async with database.begin() as connection:
        await connection.execute(insert(AttemptTable).values(rollout_id=rollout_id, n=attempt))
        patch = NewPatch(rollout_id, attempt, "", pack_text(""), 0, 0)
        patch_id = await rollouts.store_patch(connection, patch)
        verdict = NewGrade(
            patch_id=patch_id,
            grader="g",
            grader_version="1",
            solved=True,
            rejected=False,
            rule="",
            reason="",
            tests={},
            fail_to_pass=None,
            pass_to_pass=None,
            rewards=None,
            findings=[],
            repeat=0,
            has_oracle=False,
            flags=[],
            duration_seconds=1.0,
            rollout_id=rollout_id,
            log=pack_text(""),
        )
        return await grades.store_grade(connection, verdict)


async def claim_twice(database: Database, activities: RolloutRecordActivities) -> int:
    async with database.begin() as connection:
        rollout_id = int((await connection.execute(select(RolloutTable.id).limit(1))).scalar_one())
    for name in ("old life", "new life"):
        workflow = life(name, await workflow_of(database, rollout_id))
        await workflow.run(activities.claim, RolloutInput(rollout_id=rollout_id))
    return rollout_id


async def end(activities: RolloutRecordActivities, name: str, input: FinaliseInput) -> RolloutResult:
    workflow = life(name, await workflow_of(activities.database, input.rollout_id))
    return await workflow.run(activities.finalise, input)


@pytest.mark.parametrize(
    ("attempt", "failure"), [(1, None), (1, "infra_failed"), (2, "infra_failed"), (3, "cancelled")]
)
async def test_an_earlier_life_does_not_end_the_rollout(
    database: Database, activities: RolloutRecordActivities, attempt: int, failure: str | None
) -> None:
    rollout_id = await claim_twice(database, activities)
    grade_id = None if failure else await graded(database, rollout_id, attempt)
    late = FinaliseInput(rollout_id=rollout_id, attempt=attempt, grade_id=grade_id, failure=failure)
    with pytest.raises(ApplicationError, match="at attempt 2 of workflow run new life") as refused:
        await end(activities, "old life", late)
    assert refused.value.type == "FencedError" and refused.value.non_retryable
    async with database.begin() as connection:
        assert await rollouts.is_rollout_open(connection, rollout_id)
    mine = FinaliseInput(rollout_id=rollout_id, attempt=2, failure="infra_failed")
    assert (await end(activities, "new life", mine)).outcome == "infra_failed"


async def test_the_verdict_of_a_run_that_was_reset_behind_its_claim_counts(
    database: Database, activities: RolloutRecordActivities
) -> None:
    """Its claim is not made again, so the row names the run before the reset."""
    rollout_id = await claim_twice(database, activities)
    grade_id = await graded(database, rollout_id, 2)
    found = await end(activities, "reset life", FinaliseInput(rollout_id=rollout_id, attempt=2, grade_id=grade_id))
    assert (found.outcome, found.reward) == ("graded", 1.0)


async def two_rollouts(database: Database) -> list[int]:
    async with database.begin() as connection:
        return list((await connection.execute(select(RolloutTable.id).order_by(RolloutTable.id))).scalars())


@contextlib.asynccontextmanager
async def fenced(reason: str) -> AsyncIterator[None]:
    """Expect that the block's activity is refused as a stale one, and not as a bug."""
    with pytest.raises(ApplicationError, match=reason) as refused:
        yield
    assert refused.value.type == "FencedError" and refused.value.non_retryable


async def test_a_grade_of_another_rollout_ends_none(database: Database, activities: RolloutRecordActivities) -> None:
    """Ids are given again after a restore of the store to an older state."""
    mine = await claim_twice(database, activities)
    other = next(one for one in await two_rollouts(database) if one != mine)
    grade_id = await graded(database, other, 1)
    async with fenced(f"rollout {mine} has no grade {grade_id}"):
        await end(activities, "new life", FinaliseInput(rollout_id=mine, attempt=2, grade_id=grade_id))
    async with database.begin() as connection:
        assert await rollouts.is_rollout_open(connection, mine)
        with pytest.raises(FencedError):
            await grades.get_grade(connection, grade_id, other, patch_id=10**9)
        patch_id = (await grades.get_grade(connection, grade_id, other)).patch_id
        with pytest.raises(FencedError):
            await rollouts.get_patch(connection, patch_id, mine)


async def test_a_grade_that_the_store_has_lost_ends_no_rollout(
    database: Database, activities: RolloutRecordActivities
) -> None:
    mine = await claim_twice(database, activities)
    async with fenced("has no grade 999999"):
        await end(activities, "new life", FinaliseInput(rollout_id=mine, attempt=2, grade_id=999999))


async def test_a_rollout_that_has_the_id_of_another_is_neither_claimed_nor_ended(
    database: Database, activities: RolloutRecordActivities
) -> None:
    mine, other = (await two_rollouts(database))[:2]
    foreign = life("a life", await workflow_of(database, other))
    async with fenced("has no rollout"):
        await foreign.run(activities.claim, RolloutInput(rollout_id=mine))
    await life("a life", await workflow_of(database, mine)).run(activities.claim, RolloutInput(rollout_id=mine))
    grade_id = await graded(database, mine, 1)
    async with fenced("may not end it"):
        await foreign.run(activities.finalise, FinaliseInput(rollout_id=mine, attempt=1, grade_id=grade_id))
    async with database.begin() as connection:
        assert await rollouts.is_rollout_open(connection, mine)


async def test_rows_that_the_store_has_lost_are_fenced(database: Database, activities: RolloutRecordActivities) -> None:
    lost = 10**9
    some = life("a life", "rollout/lost")
    members = GroupRecordActivities(database, activities.settings, activities.configs)
    async with fenced("lacks a row"):
        await some.run(activities.claim, RolloutInput(rollout_id=lost))
    async with fenced("lacks a row"):
        await some.run(activities.finalise, FinaliseInput(rollout_id=lost, attempt=1, failure="infra_failed"))
    async with fenced("lacks a row"):
        await some.run(members.replace_member, MemberInput(rollout_id=lost))
    async with fenced("lacks a row"):
        await some.run(members.settle_group, GroupInput(group_id=lost))


async def test_a_claim_does_not_read_the_whole_task(database: Database, activities: RolloutRecordActivities) -> None:
    """A task's spec may have megabytes, and most stages need one short column of the task."""
    sent: list[str] = []
    event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *values: sent.append(values[2]))
    await claim_twice(database, activities)
    assert any("task.label" in statement for statement in sent)
    assert not [statement for statement in sent if "task.spec" in statement]


@pytest.mark.parametrize("reason", ["pre_command failed: \0\1ELF", "no UTF-8: \udcff"])
async def test_a_rollout_ends_with_a_reason_that_postgres_would_refuse(
    database: Database, activities: RolloutRecordActivities, reason: str
) -> None:
    rollout_id = await claim_twice(database, activities)
    failed = FinaliseInput(rollout_id=rollout_id, attempt=2, failure="infra_failed", reason=reason)
    assert (await end(activities, "new life", failed)).outcome == "infra_failed"
    async with database.begin() as connection:
        told = select(RolloutTable.outcome_reason).where(RolloutTable.id == rollout_id)
        assert (await connection.execute(told)).scalar_one() == storable_text(reason)
