"""The extent of a fault in a run, over rows as rollouts, planners and learners leave them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import GroupState, Purpose
from reads.recall import Recall, read_extent, read_recall
from store import plans
from store.database import Database
from store.schema import (
    BatchTable,
    CheckpointTable,
    EvaluationTable,
    GradeTable,
    PatchTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TaskTable,
    TurnTable,
)
from tests.integration.training.records import make_config, make_group, make_run
from training.planner import plan_step, plan_stored

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
REWARDS = [1.0, 0.0, 0.0, 1.0]


async def judge(connection: AsyncConnection, rollout_id: int, solved: bool, by: str = "eval_cmd@5", **row: Any) -> int:
    """Store a verdict of a grader version on the rollout's only patch; return the grade's id."""
    grader, _, version = by.partition("@")
    patch = select(PatchTable.id).where(PatchTable.rollout_id == rollout_id)
    patch_id = (await connection.execute(patch)).scalar_one_or_none()
    if patch_id is None:
        new = {"rollout_id": rollout_id, "attempt": 1, "base_commit": "c", "diff": b"", "num_bytes": 0, "num_files": 0}
        patch_id = (await connection.execute(insert(PatchTable).values(**new).returning(PatchTable.id))).scalar_one()
    values = {"rollout_id": rollout_id, "patch_id": patch_id, "grader": grader, "grader_version": version}
    values |= {"solved": solved, "log": b"", "duration_seconds": 1.0, "created_at": NOON} | row
    return int((await connection.execute(insert(GradeTable).values(**values).returning(GradeTable.id))).scalar_one())


async def adopt(connection: AsyncConnection, rollout_id: int, grade_id: int, **row: Any) -> None:
    values = {"grade_id": grade_id, "timings": {"grade": 3.0, "control_run": 1.0, "agent": 99.0}} | row
    await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout_id).values(**values))


async def members_of(connection: AsyncConnection, group_id: int) -> list[int]:
    ids = select(RolloutTable.id).where(RolloutTable.group_id == group_id).order_by(RolloutTable.member)
    return list((await connection.execute(ids)).scalars())


async def graded_group(
    connection: AsyncConnection, run_id: str, number: int, graders: Sequence[str] = ("eval_cmd@5",) * 4
) -> list[int]:
    """Make a ready group of the task `number`, whose members these grader versions have judged; return the members."""
    members = await members_of(connection, await make_group(connection, run_id, number, REWARDS))
    unnamed = update(TaskTable).where(TaskTable.dataset_digest == run_id, TaskTable.label == str(number))
    await connection.execute(unnamed.values(label=f"task-{number}"))
    for rollout_id, reward, by in zip(members, REWARDS, graders, strict=True):
        await adopt(connection, rollout_id, await judge(connection, rollout_id, reward == 1.0, by))
    return members


def one_group_a_step() -> RunConfig:
    return make_config(training={"groups_per_step": 1, "steps": 4})


async def plan(connection: AsyncConnection, run_id: str, num_steps: int) -> None:
    stepped = update(BatchTable).where(BatchTable.run_id == run_id).values(state="stepped")
    for step in range(1, num_steps + 1):
        assert await plan_step(connection, run_id, one_group_a_step()) == step
        await connection.execute(stepped)


async def trained_run(
    database: Database, run_id: str, graders: Sequence[Sequence[str]] = (("eval_cmd@5",) * 4,) * 4
) -> list[list[int]]:
    """Make a run whose step n + 1 was trained on task n, whose members `graders[n]` judged; return them by step."""
    await make_run(database, run_id, one_group_a_step())
    async with database.begin() as connection:
        found = [await graded_group(connection, run_id, number, by) for number, by in enumerate(graders)]
        await plan(connection, run_id, len(graders))
    return found


async def save(connection: AsyncConnection, run_id: str, step: int, is_kept: bool = True) -> None:
    """Write a checkpoint and the weights of its step, which are retired unless they are kept."""
    saved = {"run_id": run_id, "step": step, "epoch": 1, "uri": f"/gone/{step}"}
    await connection.execute(insert(CheckpointTable).values(**saved, world_size=1, num_threads=1))
    state = "published" if is_kept else "retired"
    version = {"version": f"{run_id}/{step}.e1", "files": [], "state": state}
    await connection.execute(insert(PolicyVersionTable).values(**saved, **version))


async def tokens_of(database: Database, run_id: str, *steps: int) -> int:
    async with database.begin() as connection:
        rows = [await plans.get_plan(connection, run_id, step) for step in steps]
    return sum(member["num_tokens"] for row in rows if row for member in row.members)


async def recalled(database: Database, run_id: str, **fault: Any) -> Recall:
    async with database.begin() as connection:
        return await read_recall(connection, run_id, **fault)


async def test_a_task_that_one_step_was_trained_on(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    async with database.begin() as connection:
        for step in (1, 3):
            await save(connection, run_id, step)
    found = await recalled(database, run_id, task="task-1")
    assert (found.num_tasks, found.num_groups, found.num_rollouts) == (1, 1, 4)
    assert (found.num_solved, found.num_not_solved, found.num_without_verdict) == (2, 2, 0)
    assert (found.first_step, found.num_steps, found.num_trained_groups, found.num_partly_touched) == (2, 1, 1, 0)
    assert found.num_trained_tokens == found.num_own_tokens == await tokens_of(database, run_id, 2) > 0
    assert (found.clean_checkpoint, found.start_step) == (1, 1), "at the step before; that of step 3 is not clean"
    assert (found.num_steps_again, found.num_tokens_again) == (3, await tokens_of(database, run_id, 2, 3, 4))
    assert (found.num_patches, found.grading_seconds) == (4, 16.0)
    assert found.to_grade == [f"group/{run_id}/1"]


async def test_nothing_is_touched(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    found = await recalled(database, run_id, grader="eval_cmd", since=NOON + timedelta(seconds=1))
    assert (found.num_rollouts, found.num_groups, found.num_trained_tokens, found.num_patches) == (0, 0, 0, 0)
    assert (found.first_step, found.num_steps, found.num_steps_again, found.grading_seconds) == (None, 0, 0, 0.0)
    assert not found.to_grade and not found.evaluations and not found.descendants


async def test_a_verdict_that_replaced_another_meanwhile_is_none_of_them(database: Database, run_id: str) -> None:
    """But that of a rollout that has ended meanwhile is."""
    members = (await trained_run(database, run_id))[1]
    fault = (await recalled(database, run_id, task="task-1")).fault
    later = NOON + timedelta(days=1)
    async with database.begin() as connection:
        await connection.execute(update(RolloutTable).values(ended_at=NOON))
        regraded = update(GradeTable).where(GradeTable.rollout_id.in_(members[:2])).values(created_at=later)
        await connection.execute(regraded)
        ended_later = update(RolloutTable).where(RolloutTable.id == members[1]).values(ended_at=later)
        await connection.execute(ended_later)
        found = await read_extent(connection, fault, NOON + timedelta(seconds=1))
    assert (found.num_rollouts, found.num_steps) == (3, 1)
    assert 0 < found.num_own_tokens < await tokens_of(database, run_id, 2)


async def test_everything_is_touched_from_the_first_step_on(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    async with database.begin() as connection:
        await save(connection, run_id, 2)
        await connection.execute(update(RunTable).values(state="done"))
    found = await recalled(database, run_id, grader="eval_cmd@5")
    assert (found.num_tasks, found.num_groups, found.num_rollouts, found.num_steps) == (4, 4, 16, 4)
    assert (found.first_step, found.clean_checkpoint, found.start_step) == (1, None, None)
    assert found.num_tokens_again == found.num_trained_tokens == await tokens_of(database, run_id, 1, 2, 3, 4)
    assert found.to_grade == [run_id]


async def test_weights_of_the_clean_checkpoint_that_are_deleted(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    async with database.begin() as connection:
        await save(connection, run_id, 1)
        await save(connection, run_id, 2, is_kept=False)
    found = await recalled(database, run_id, task="task-3")
    assert (found.first_step, found.clean_checkpoint, found.start_step, found.num_steps_again) == (4, 2, 1, 3)
    lora = make_config(training={"lora": {}}).model_dump(mode="json")
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(config=lora))
    adapter = await recalled(database, run_id, task="task-3")
    assert (adapter.clean_checkpoint, adapter.start_step, adapter.num_steps_again) == (2, None, 4)


async def test_a_regraded_rollout_counts_by_the_verdict_in_force_and_by_those_that_steps_used(
    database: Database, run_id: str
) -> None:
    members = await trained_run(database, run_id)
    async with database.begin() as connection:
        new = await judge(connection, members[1][0], False, "eval_cmd@6")  # as a recall puts it in force
        await adopt(connection, members[1][0], new, reward=0.0)
        await judge(connection, members[2][0], False, "eval_cmd@6")  # nothing rests on it
    old = await recalled(database, run_id, grader="eval_cmd@5")
    assert (old.num_rollouts, old.num_solved, old.num_steps) == (16, 8, 4), "step 2 was trained on the earlier one"
    new_one = await recalled(database, run_id, grader="eval_cmd@6")
    assert (new_one.num_rollouts, new_one.num_not_solved, new_one.num_steps) == (1, 1, 0)
    both = await recalled(database, run_id, grader="eval_cmd")
    assert (both.num_rollouts, both.num_solved, both.num_not_solved) == (16, 7, 9), "one rollout counts once"
    assert both.num_trained_tokens == await tokens_of(database, run_id, 1, 2, 3, 4)


async def test_a_group_that_is_touched_in_part_is_touched(database: Database, run_id: str) -> None:
    mixed = ("eval_cmd@5", "eval_cmd@4", "eval_cmd@4", "eval_cmd@4")
    members = await trained_run(database, run_id, [mixed, ("eval_cmd@4",) * 4])
    found = await recalled(database, run_id, grader="eval_cmd@5")
    assert (found.num_rollouts, found.num_patches, found.num_trained_groups, found.num_partly_touched) == (1, 1, 1, 1)
    async with database.begin() as connection:
        row = await plans.get_plan(connection, run_id, 1)
    assert row is not None
    own = sum(one["num_tokens"] for one in row.members if one["rollout_id"] == members[0][0])
    assert 0 < own == found.num_own_tokens < found.num_trained_tokens == await tokens_of(database, run_id, 1)


async def test_rollouts_of_other_runs_do_not_count(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    await trained_run(database, "other")
    before = await recalled(database, run_id, grader="eval_cmd")
    async with database.begin() as connection:
        same = select(RolloutTable.task_id).where(RolloutTable.run_id == run_id).limit(1).scalar_subquery()
        await connection.execute(update(RolloutTable).where(RolloutTable.run_id == "other").values(task_id=same))
    after = await recalled(database, run_id, grader="eval_cmd")
    assert replace(after, read_at=before.read_at) == before
    assert (await recalled(database, run_id, task="task-0")).num_rollouts == 4


async def test_a_run_on_stored_groups(database: Database, run_id: str) -> None:
    members = await trained_run(database, run_id)
    config = make_config(training={"groups_per_step": 2, "steps": 2})
    for name, source in (("stored", run_id), ("clean", run_id)):
        await make_run(database, name, config)
        async with database.begin() as connection:
            of_name = update(RunTable).where(RunTable.run_id == name)
            await connection.execute(of_name.values(source_run_id=source, state="done"))
    async with database.begin() as connection:
        assert await plan_stored(connection, "stored", run_id, config) == 2
        one = make_config(training={"groups_per_step": 1, "steps": 1})
        assert await plan_stored(connection, "clean", run_id, one) == 1
    of_source = await recalled(database, run_id, task="task-3")
    assert of_source.descendants == {"stored": f"trains on stored groups of {run_id}"}
    assert (await recalled(database, run_id, grader="eval_cmd@5")).descendants.keys() == {"stored", "clean"}
    async with database.begin() as connection:
        other = await judge(connection, members[0][0], True, "eval_cmd@6")
        mended = [{"rollout_id": members[0][0], "grade_id": other}]
        await connection.execute(update(BatchTable).where(BatchTable.run_id == "clean").values(members=mended))
        await connection.execute(update(RunTable).where(RunTable.run_id == "clean").values(init_from=f"{run_id}@0"))
    of_old = await recalled(database, run_id, grader="eval_cmd@5")
    assert of_old.descendants.keys() == {"stored"}, "the other one trains verdicts that are not wrong"
    async with database.begin() as connection:  # a verdict that a step used, before the source got another one
        new = await judge(connection, members[3][0], False, "eval_cmd@6")
        await adopt(connection, members[3][0], new, reward=0.0)
    found = await recalled(database, "stored", task="task-3")
    assert (found.num_rollouts, found.num_groups, found.first_step, found.num_steps) == (4, 1, 2, 1)
    assert found.num_trained_tokens == await tokens_of(database, run_id, 4)
    assert found.to_grade == [f"group/{run_id}/3"]
    assert not (await recalled(database, "stored", grader="eval_cmd@5")).descendants
    with pytest.raises(ConfigError, match="eval_cmd@6"):
        await recalled(database, "stored", grader="eval_cmd@6")
    by_hand = [f"rollout/{run_id}/3/0"]
    async with database.begin() as connection:  # a run rests on what it planned, however far back that was sampled
        await connection.execute(update(RunTable).values(source_run_id=None, init_from=None))
    assert (await recalled(database, "stored", rollouts=by_hand)).num_rollouts == 1
    with pytest.raises(ConfigError, match="run clean does not rest on it"):
        await recalled(database, "clean", rollouts=by_hand)


async def test_evaluations_and_rollouts_without_a_verdict(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    async with database.begin() as connection:
        for number, label, step in ((10, "start-t1", 0), (11, "start-t1", 0), (12, "end-t1", 4)):
            members = await graded_group(connection, run_id, number)
            of_group = update(RolloutGroupTable).where(RolloutGroupTable.group_no == number)
            await connection.execute(of_group.values(purpose=Purpose.EVAL, label=label))
            await connection.execute(
                update(RolloutTable).where(RolloutTable.id.in_(members)).values(purpose=Purpose.EVAL)
            )
            if number != 11:
                row = {"run_id": run_id, "label": label, "step": step, "temperature": 1.0, "num_samples": 4}
                await connection.execute(insert(EvaluationTable).values(**row, policy_version="v"))
            if number == 10:
                failed: dict[str, Any] = {
                    "outcome": "grader_failed",
                    "reward": None,
                    "grade_id": None,
                    "ended_at": NOON,
                }
                failed["replaced_by"] = members[1]
                await connection.execute(update(RolloutTable).where(RolloutTable.id == members[0]).values(**failed))
                running = {"outcome": None, "reward": None, "grade_id": None}
                await connection.execute(update(RolloutTable).where(RolloutTable.id == members[3]).values(**running))
    found = await recalled(database, run_id, task="task-10")
    assert (found.num_rollouts, found.num_solved, found.num_not_solved, found.num_without_verdict) == (3, 0, 2, 1)
    assert [(one.label, one.step, one.num_touched, one.num_counted) for one in found.evaluations] == [
        ("start-t1", 0, 2, 6)
    ]
    assert (found.first_step, found.num_patches) == (None, 3)
    assert found.to_grade == [f"group/{run_id}/10"]
    whole = await recalled(database, run_id, grader="eval_cmd")
    assert [(one.label, one.num_touched, one.num_counted) for one in whole.evaluations] == [
        ("start-t1", 6, 6),
        ("end-t1", 4, 4),
    ]
    assert whole.num_without_verdict == 1, "its grader failed"
    assert (await recalled(database, run_id, grader="eval_cmd@5")).num_without_verdict == 0, "no version failed"


@pytest.mark.parametrize(
    ("since", "number"),
    [
        (datetime(2026, 11, 1, 14, tzinfo=timezone(timedelta(hours=2))), 16),
        (datetime(2026, 11, 1, 12, 1, tzinfo=UTC), 0),
        (datetime(2026, 11, 1, 13, tzinfo=timezone(timedelta(hours=2))), 16),
        (NOON.astimezone().replace(tzinfo=None), 16),  # in this machine's zone
    ],
)
async def test_since(database: Database, run_id: str, since: datetime, number: int) -> None:
    await trained_run(database, run_id)
    found = await recalled(database, run_id, grader="eval_cmd", since=since)
    assert found.num_rollouts == number and found.since is not None and found.since.tzinfo is not None


async def test_descendants(database: Database, run_id: str) -> None:
    """Of weights from the first touched step on, also over other runs; of forks of touched rollouts."""
    members = await trained_run(database, run_id)
    begun = {"early": f"{run_id}@1", "late": f"{run_id}@2", "later": "late@0", "path": "/models/x", "odd": "@x"}
    for name in (*begun, "fork"):
        await make_run(database, name, one_group_a_step())
    async with database.begin() as connection:
        for name, init_from in begun.items():
            await connection.execute(update(RunTable).where(RunTable.run_id == name).values(init_from=init_from))
        turn = select(TurnTable.id).where(TurnTable.rollout_id == members[1][2]).limit(1).scalar_subquery()
        row = {"group_no": 0, "task_id": 1, "purpose": "eval", "size": 2, "min_graded": 1, "temperature": 1.0}
        await connection.execute(
            insert(RolloutGroupTable).values(run_id="fork", **row, workflow_id="f", forked_turn_id=turn)
        )
    found = await recalled(database, run_id, task="task-1")
    assert found.descendants == {
        "late": f"begins from {run_id}@2",
        "later": "begins from late@0",
        "fork": "forks touched rollouts",
    }
    assert not (await recalled(database, run_id, task="task-2")).descendants


async def test_rollouts_by_hand_and_groups_that_no_step_used(database: Database, run_id: str) -> None:
    await make_run(database, run_id, one_group_a_step())
    async with database.begin() as connection:
        members = await graded_group(connection, run_id, 0)
        await connection.execute(update(RolloutTable).where(RolloutTable.id == members[0]).values(group_id=None))
    found = await recalled(database, run_id, rollouts=[f"#{members[0]}"])
    assert (found.num_groups, found.num_rollouts, found.num_tasks, found.first_step) == (0, 1, 1, None)
    assert found.to_grade == [f"rollout/{run_id}/0/0"]
    whole = await recalled(database, run_id, grader="eval_cmd")
    assert (whole.num_groups, whole.num_rollouts) == (1, 4)
    assert whole.to_grade == [run_id]


async def test_some_rollouts(database: Database, run_id: str) -> None:
    """Each is graded again alone; the groups of all of them are touched."""
    members = await trained_run(database, run_id)
    names = [f"rollout/{run_id}/2/1", str(members[2][2]), f"#{members[3][0]}"]
    found = await recalled(database, run_id, rollouts=names)
    assert (found.num_rollouts, found.num_groups, found.num_partly_touched, found.num_steps) == (3, 2, 2, 2)
    names = [f"rollout/{run_id}/{name}" for name in ("2/1", "2/2", "3/0")]
    assert found.to_grade == names and found.num_patches == 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({}, "name one of --task, --family, --grader and --rollout"),
        ({"family": "odds"}, "of a family 'odds'; there are none"),
        ({"task": "task-1", "grader": "eval_cmd"}, "name one of"),
        ({"task": "task-x"}, "there is no task 'task-x'"),
        ({"task": "group/other/0"}, "is a group of run other; name a task"),
        ({"grader": "eval_cmt"}, "did you mean eval_cmd"),
        ({"grader": "pytest"}, "by a grader 'pytest'; there are eval_cmd, eval_cmd@5"),
        ({"grader": "eval_cmd@7"}, "did you mean eval_cmd@5"),
        ({"rollouts": ["nobody"]}, "no rollout 'nobody'"),
        ({"rollouts": ["rollout/other/0/0"]}, "of run other, and run .* does not rest on it"),
    ],
)
async def test_what_does_not_exist_is_refused(
    database: Database, run_id: str, fault: dict[str, Any], said: str
) -> None:
    await trained_run(database, run_id)
    await make_run(database, "other", one_group_a_step())
    async with database.begin() as connection:
        await graded_group(connection, "other", 0)
    with pytest.raises(ConfigError, match=said):
        await recalled(database, run_id, **fault)


async def test_a_task_by_its_page_and_an_unknown_run(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    assert (await recalled(database, f"run/{run_id}", task="http://h/tasks/2")).first_step == 2
    with pytest.raises(ConfigError, match="there is no run 'nobody'"):
        await recalled(database, "nobody", task="task-1")


async def test_a_discarded_plan_is_not_counted(database: Database, run_id: str) -> None:
    await trained_run(database, run_id)
    async with database.begin() as connection:
        await connection.execute(delete(BatchTable).where(BatchTable.run_id == run_id, BatchTable.step == 4))
        cancelled = update(RolloutGroupTable).where(RolloutGroupTable.group_no == 3)
        await connection.execute(cancelled.values(state=GroupState.CANCELLED))
    found = await recalled(database, run_id, task="task-3")
    assert (found.num_rollouts, found.num_trained_tokens, found.first_step) == (4, 0, None)
