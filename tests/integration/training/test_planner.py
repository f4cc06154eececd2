"""Plan rows: which groups enter a step, once, in an order that the run's seed fixes."""

import asyncio
from typing import Any, cast

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities, next_tasks
from ratchet.config import RunConfig
from ratchet.payloads import EndRunInput, ViewRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import BatchState, GroupState, Purpose, RunState
from scheduling import group_selection
from scheduling.group_selection import plannable
from store import chains, groups, open_runs, runs
from store.database import Database
from store.runs import OrderedTask
from store.schema import BatchItemTable, BatchTable, RolloutGroupTable, RolloutTable, RunTable
from tests.integration.training.records import make_config, make_group, make_run
from training.plan_types import Plan
from training.planner import load_sequences, load_step_plan, plan_step

SOLVED_ONCE = [1.0, 0.0, 0.0, 0.0]


async def uses(database: Database, run_id: str) -> dict[int, tuple[int, str]]:
    """Return group number -> (step, use)."""
    query = select(RolloutGroupTable.group_no, BatchItemTable.step, BatchItemTable.use).join(
        BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id
    )
    async with database.begin() as connection:
        return {
            row[0]: (row[1], row[2]) for row in await connection.execute(query.where(BatchItemTable.run_id == run_id))
        }


async def plan(database: Database, run_id: str, config: RunConfig) -> Plan | None:
    """Plan a step and mark it as trained."""
    async with database.begin() as connection:
        step = await plan_step(connection, run_id, config)
        if step is None:
            return None
        await connection.execute(
            update(BatchTable)
            .where(BatchTable.run_id == run_id, BatchTable.step == step)
            .values(state=BatchState.STEPPED)
        )
        return await load_step_plan(connection, run_id, step)


async def make(database: Database, run_id: str, config: RunConfig, *groups: dict[str, Any]) -> list[int]:
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        return [
            await make_group(connection, run_id, number, **{"rewards": SOLVED_ONCE} | group)
            for number, group in enumerate(groups)
        ]


async def run_state(connection: AsyncConnection, run_id: str) -> str:
    """Return the run's state and its reason, if it has one."""
    row = await runs.get_run(connection, run_id)
    assert row is not None
    return f"{row.state} {row.state_reason}".strip()


async def test_the_oldest_ready_groups_enter_and_planning_again_changes_nothing(
    database: Database, run_id: str
) -> None:
    config = make_config()
    groups = await make(database, run_id, config, {}, {}, {})
    async with database.begin() as connection:
        assert await plannable(connection, run_id, config)
        assert await plan_step(connection, run_id, config) == 1
        assert await plan_step(connection, run_id, config) == 1
        planned = await load_step_plan(connection, run_id, 1)
    assert planned is not None
    assert [member.group_id for member in planned.members] == sorted(groups[:2] * 4)
    assert [member.advantage for member in planned.members if member.group_id == groups[0]] == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]
    assert await uses(database, run_id) == {0: (1, "trained"), 1: (1, "trained")}
    async with database.begin() as connection:
        sequences = await load_sequences(
            connection, [member.rollout_id for member in planned.members], planned.min_policy_step
        )
    trained = {member.rollout_id: 0 for member in planned.members}
    for sequence in sequences:
        trained[sequence.rollout_id] += int(sequence.mask.sum())
        assert (sequence.behaviour[sequence.mask] < 0).all() and sequence.mask[-1]
    assert trained == {member.rollout_id: member.num_tokens for member in planned.members}
    assert sum(member.weight * member.num_tokens for member in planned.members) == pytest.approx(1)


async def test_too_few_groups_are_no_step(database: Database, run_id: str) -> None:
    config = make_config()
    await make(database, run_id, config, {})
    assert await plan(database, run_id, config) is None
    assert await uses(database, run_id) == {}


async def test_concurrent_planners_write_one_row(database: Database, run_id: str) -> None:
    config = make_config()
    await make(database, run_id, config, *[{}] * 6)

    async def planner() -> int | None:
        async with database.begin() as connection:
            return await plan_step(connection, run_id, config)

    async def viewer() -> None:
        async with database.begin() as connection:
            await group_selection.consume_without_signal(connection, run_id, config)

    assert set(await asyncio.gather(planner(), viewer(), planner(), viewer(), planner())) - {None} == {1}
    assert len(await uses(database, run_id)) == 2


async def test_a_group_cannot_enter_twice(database: Database, run_id: str) -> None:
    config = make_config()
    groups = await make(database, run_id, config, {}, {})
    await plan(database, run_id, config)
    with pytest.raises(IntegrityError):
        async with database.begin() as connection:
            await connection.execute(
                update(RolloutGroupTable).where(RolloutGroupTable.id.in_(groups)).values(state="ready")
            )
            await plan_step(connection, run_id, config)


async def test_equal_rewards_are_consumed_and_make_the_step_smaller(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 3, "max_groups_seen": 4})
    await make(database, run_id, config, {}, {"rewards": [1.0] * 4}, {"rewards": [0.0] * 4}, {})
    async with database.begin() as connection:
        await group_selection.consume_without_signal(connection, run_id, config)
        await group_selection.consume_without_signal(connection, run_id, config)
        assert await plannable(connection, run_id, config), "four groups seen, two of them with signal"
    planned = await plan(database, run_id, config)
    assert planned is not None and len(planned.members) == 8
    assert {number: use for number, (_, use) in (await uses(database, run_id)).items()} == {
        0: "trained",
        1: "no_signal",
        2: "no_signal",
        3: "trained",
    }


async def test_a_teacher_gives_equal_rewards_a_signal(database: Database, run_id: str) -> None:
    distilled = {"distillation": 1.0, "teacher_model": "/models/teacher"}
    config = make_config(training={"groups_per_step": 3}, loss=distilled)
    await make(database, run_id, config, {}, {"rewards": [1.0] * 4}, {"rewards": [0.0] * 4})
    async with database.begin() as connection:
        await group_selection.consume_without_signal(connection, run_id, config)
        assert await plannable(connection, run_id, config)
    planned = await plan(database, run_id, config)
    assert planned is not None and all(member.num_tokens and member.weight for member in planned.members)
    assert [use for _, use in (await uses(database, run_id)).values()] == ["trained"] * 3


async def test_a_run_that_finds_no_signal_is_paused(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 2, "max_groups_seen": 2})
    dull, number = [0.0] * 4, 0

    async def view(count: int) -> str:
        nonlocal number
        async with database.begin() as connection:
            for group_no in range(number, number + count):
                await make_group(connection, run_id, group_no, dull)
            number += count
            await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(next_group_no=number))
            await group_selection.consume_without_signal(connection, run_id, config)
            return await run_state(connection, run_id)

    await make_run(database, run_id, config)
    assert await view(7) == "running"
    assert (await view(1)).startswith("paused 8 groups in a row gave no step 1")
    async with database.begin() as connection:
        assert await open_runs.resume_run(connection, run_id), "groups from before the resume do not count"
    assert await view(7) == "running"
    assert (await view(1)).startswith("paused 8 groups")


async def test_a_run_whose_groups_all_fail_is_paused(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 2, "max_groups_seen": 2})
    broken = {"outcome": "grader_failed", "outcome_reason": "no such program: tox", "reward": None}
    number = 0

    async def view(**member: Any) -> str:
        nonlocal number
        async with database.begin() as connection:
            group_id = await make_group(connection, run_id, number, SOLVED_ONCE, members=[member] * 4)
            number += 1
            if member:
                await connection.execute(
                    update(RolloutGroupTable).where(RolloutGroupTable.id == group_id).values(state=GroupState.FAILED)
                )
            await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(next_group_no=number))
            await group_selection.pause_if_all_fail(connection, run_id, config.training)
            return await run_state(connection, run_id)

    await make_run(database, run_id, config)
    assert await view(**broken) == "running"
    assert await view() == "running", "a group with its verdicts restarts the count"
    assert await view(**broken) == "running"
    paused = await view(**broken)
    assert paused == "paused 2 groups in a row got too few verdicts, most often grader_failed: no such program: tox"
    async with database.begin() as connection:
        assert await open_runs.resume_run(connection, run_id), "groups from before the resume do not count"
    assert await view(**broken) == "running"


async def test_a_run_ends_after_its_last_checkpoint(database: Database, run_id: str) -> None:
    config = make_config()
    await make_run(database, run_id, config)
    settings = load_temporal_settings()
    activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None))

    async def state() -> str:
        async with database.begin() as connection:
            return await run_state(connection, run_id)

    ending = asyncio.create_task(activities.end_run(EndRunInput(run_id=run_id, state=RunState.DONE)))
    await asyncio.wait([ending], timeout=1)
    assert (ending.done(), await state()) == (False, "running")
    async with database.begin() as connection:
        values = {
            "step": config.training.steps,
            "checkpoint_step": config.training.steps,
            "checkpoint_uri": "/checkpoint",
        }
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values))
    await ending
    assert await state() == "done"
    await activities.end_run(EndRunInput(run_id=run_id, state=RunState.DONE))
    view = await activities.advance_run(ViewRunInput(run_id=run_id))
    assert view.state is RunState.DONE and not view.open_groups, "an ended run gets no new groups"


async def test_staleness(database: Database, run_id: str) -> None:
    """Step 4 trains weights 3: with a bound of 1, tokens of version 2 are not too old, those of version 1 are."""
    config = make_config(training={"max_staleness": 1, "groups_per_step": 1})
    await make(database, run_id, config, {"step": 0}, {"step": 1}, {"step": 2}, {"step": 2}, {"step": 2})
    planned = [await plan(database, run_id, config) for _ in range(4)]
    assert [one.min_policy_step if one else None for one in planned] == [0, 0, 1, 2]
    assert {number: step for number, (step, _) in (await uses(database, run_id)).items()} == {0: 1, 1: 2, 2: 3, 3: 4}
    assert await plan(database, run_id, config) is None
    assert (await uses(database, run_id))[4] == (5, "expired")


async def test_tasks_outside_of_the_solve_rates_get_no_group_for_a_while(database: Database, run_id: str) -> None:
    """Rates are over the groups of the last two steps, without late rollouts. Other tasks are used in turn."""
    config = make_config(training={"solve_rates": [0.1, 0.9], "solve_rate_steps": 2})
    late = [{}, {"late": True}]
    groups = [
        {"rewards": [1.0, 1.0]},
        {"rewards": [0.0, 0.0]},
        {"rewards": [1.0, 0.0]},
        {"rewards": [1.0, 0.0], "members": late},
    ]
    ids = await make(database, run_id, config, *groups)
    async with database.begin() as connection:
        rows = (
            await connection.execute(
                select(RolloutGroupTable.id, RolloutGroupTable.task_id).where(RolloutGroupTable.id.in_(ids))
            )
        ).all()
        task_of = {row.id: row.task_id for row in rows}
        await runs.set_task_order(
            connection, run_id, Purpose.TRAIN, [OrderedTask(task_of[one], 0) for one in reversed(ids)]
        )
        await connection.execute(update(RolloutGroupTable).where(RolloutGroupTable.id == ids[0]).values(started_step=5))
        await connection.execute(
            update(RolloutGroupTable).where(RolloutGroupTable.id.in_(ids[1:])).values(started_step=6)
        )

        async def chosen(published: int, count: int) -> list[int]:
            numbers = {task: number for number, task in enumerate(task_of[one] for one in ids)}
            picked = await next_tasks(connection, run_id, config, published, 0, count, ())
            return [numbers[task.task_id] for task in picked]

        assert await chosen(6, 3) == [2, 2, 2], "solved always, never, sometimes, and always without the late ones"
        assert await chosen(7, 3) == [0, 2, 0], "the group that was always solved is too old to count"
        assert await chosen(8, 5) == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("weight", [None, 2.0])
async def test_a_weight_of_held_out_tasks_does_not_change_the_training_order(
    database: Database, run_id: str, weight: float | None
) -> None:
    held_out = {"path": "heldout.jsonl", "use": "eval", "weight": weight}
    config = make_config(datasets=[{"path": "train.jsonl"}, held_out])
    ids = await make(database, run_id, config, *[{"rewards": [1.0, 0.0]}] * 4)
    async with database.begin() as connection:
        statement = select(RolloutGroupTable.task_id).where(RolloutGroupTable.id.in_(ids))
        tasks = list((await connection.execute(statement.order_by(RolloutGroupTable.id))).scalars())
        await runs.set_task_order(connection, run_id, Purpose.TRAIN, [OrderedTask(one, 0) for one in tasks])
        picked = await next_tasks(connection, run_id, config, 0, first=2, count=3, left_out=())
    assert [tasks.index(one.task_id) for one in picked] == [2, 3, 0]


async def test_late_replaced_and_failed_members_enter_nothing(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1})
    members = [{}, {"late": True}, {"replaced_by": 1}, {}, {"outcome": "infra_failed", "reward": None}]
    await make(database, run_id, config, {"rewards": [1.0, 1.0, 1.0, 0.0, 0.0], "members": members})
    planned = await plan(database, run_id, config)
    assert planned is not None
    assert [member.advantage for member in planned.members] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("truncated", "advantages", "has_tokens"),
    [
        ("train", [0.75, -0.25, -0.25, -0.25], [True] * 4),
        ("mask", [0.75, -0.25, -0.25, -0.25], [True, False, True, False]),
        ("exclude", [0.5, -0.5], [True, True]),
    ],
)
async def test_truncated_members_are_trained_masked_or_excluded(
    database: Database, run_id: str, truncated: str, advantages: list[float], has_tokens: list[bool]
) -> None:
    config = make_config(training={"groups_per_step": 1, "truncated": truncated})
    members = [{}, {"agent_exit": "turn_limit"}, {"agent_exit": "crashed"}, {"agent_exit": "time_budget"}]
    await make(database, run_id, config, {"members": members})
    planned = await plan(database, run_id, config)
    assert planned is not None
    assert [member.advantage for member in planned.members] == advantages
    assert [member.num_tokens > 0 for member in planned.members] == has_tokens


async def test_excluding_truncated_members_may_leave_no_signal(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1, "truncated": "exclude"})
    await make(database, run_id, config, {"members": [{"agent_exit": "context_full"}]})
    async with database.begin() as connection:
        assert not await plannable(connection, run_id, config)
        await group_selection.consume_without_signal(connection, run_id, config)
    assert await uses(database, run_id) == {0: (1, "no_signal")}, (
        "or it would take the place of a group that can be trained on"
    )


async def test_cancelling_a_group_ends_members_without_a_workflow(database: Database, run_id: str) -> None:
    unclaimed = {"outcome": None, "reward": None}
    (group_id,) = await make(
        database, run_id, make_config(), {"members": [{}, unclaimed, unclaimed | {"owner": "a workflow"}]}
    )
    async with database.begin() as connection:
        await groups.cancel_group(connection, group_id)
        ended = select(RolloutTable.outcome).where(RolloutTable.group_id == group_id).order_by(RolloutTable.member)
        assert (await connection.execute(ended)).scalars().all() == ["graded", "cancelled", None, "graded"]


async def test_a_run_that_ends_early_leaves_no_open_group_without_a_workflow(database: Database, run_id: str) -> None:
    """A group whose workflow never started is ended with its run; a group with running members is ended by them."""
    unclaimed, at_work = {"outcome": None, "reward": None}, {"outcome": None, "reward": None, "owner": "a workflow"}
    made = await make(
        database, run_id, make_config(), {"members": [unclaimed] * 4}, {"members": [at_work, unclaimed]}, {}
    )
    async with database.begin() as connection:
        await connection.execute(
            update(RolloutGroupTable).where(RolloutGroupTable.id.in_(made[:2])).values(state="open")
        )
        await groups.cancel_unstarted_groups(connection, run_id)
        states = (
            select(RolloutGroupTable.state)
            .where(RolloutGroupTable.run_id == run_id)
            .order_by(RolloutGroupTable.group_no)
        )
        assert (await connection.execute(states)).scalars().all() == ["cancelled", "open", "ready"]
        outcomes = select(RolloutTable.outcome).where(RolloutTable.group_id == made[0])
        assert set((await connection.execute(outcomes)).scalars()) == {"cancelled"}


async def test_plans_are_functions_of_the_seed(database: Database, run_id: str) -> None:
    """Shuffled advantages and the split into updates are equal for equal seeds, for any row ids."""
    seen = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        config = make_config(training={"groups_per_step": 6, "updates_per_step": 3, "advantage": "shuffled"}, seed=seed)
        await make(database, run_id + name, config, *[{"rewards": [1.0, 0.0, 0.5, 0.25]}] * 6)
        planned = await plan(database, run_id + name, config)
        assert planned is not None
        by_group = sorted(planned.members, key=lambda member: (member.group_id, member.rollout_id))
        seen.append([(member.advantage, member.update, member.num_tokens, member.weight) for member in by_group])
        assert {member.update for member in planned.members} == {0, 1, 2}
        assert all(len({member.update for member in by_group[n : n + 4]}) == 1 for n in range(0, 24, 4)), (
            "a group is in one update"
        )
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(("weight", "trained"), [(0.5, [True] * 4), (0.0, [True, False, False, False])])
async def test_negative_weight_scales_failures(
    database: Database, run_id: str, weight: float, trained: list[bool]
) -> None:
    """At weight 0 their tokens are not even computed, but they stay in the baseline."""
    config = make_config(training={"groups_per_step": 1, "negative_weight": weight})
    await make(database, run_id, config, {})
    planned = await plan(database, run_id, config)
    assert planned is not None
    assert [member.advantage for member in planned.members] == [0.75, *[-0.25 * weight] * 3]
    assert [member.num_tokens > 0 for member in planned.members] == trained
    assert [member.weight > 0 for member in planned.members] == trained


async def test_nothing_is_planned_beyond_the_last_step_or_the_end(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1, "steps": 1})
    await make(database, run_id, config, {}, {})
    assert await plan(database, run_id, config) is not None
    assert await plan(database, run_id, config) is None
    longer = make_config(training={"groups_per_step": 1, "steps": 2})
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(state="cancelled"))
    assert await plan(database, run_id, longer) is None
    async with database.begin() as connection:
        states = (
            select(RolloutGroupTable.state)
            .where(RolloutGroupTable.run_id == run_id)
            .order_by(RolloutGroupTable.group_no)
        )
        assert list((await connection.execute(states)).scalars()) == ["consumed", "ready"]
        assert (await connection.execute(select(RolloutTable.id).where(RolloutTable.run_id == run_id))).all()


async def test_a_chain_longer_than_a_bin_trains_nothing_and_stays_in_the_baseline(
    database: Database, run_id: str
) -> None:
    """Advantages are over all four members; nothing is truncated; a group of only such chains is `expired`."""
    config = make_config(training={"groups_per_step": 1})
    (group,) = await make(database, run_id, config, {})
    async with database.begin() as connection:
        of_group = select(RolloutTable.id).where(RolloutTable.group_id == group)
        lengths = await chains.longest_chains(connection, list((await connection.execute(of_group)).scalars()))
    limit = sorted(lengths.values())[1]
    assert limit < max(lengths.values())
    training = config.training.model_copy(update={"bin_tokens": limit})
    planned = await plan(database, run_id, config.model_copy(update={"training": training}))
    assert planned is not None
    assert [member.advantage for member in planned.members] == [0.75, -0.25, -0.25, -0.25]
    assert {member.rollout_id for member in planned.members if member.num_tokens == 0} == {
        n for n, length in lengths.items() if length > limit
    }


async def test_rejection_sampling_trains_only_members_above_the_mean(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1}, loss={"preset": "sft"})
    await make(database, run_id, config, {})
    planned = await plan(database, run_id, config)
    assert planned is not None
    assert [member.num_tokens > 0 for member in planned.members] == [True, False, False, False]


async def test_batch_advantages_have_one_standard_deviation(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 2, "advantage": "batch"})
    await make(database, run_id, config, {}, {"rewards": [1.0, 1.0, 0.0, 0.0]})
    planned = await plan(database, run_id, config)
    assert planned is not None
    values = [member.advantage for member in planned.members]
    assert sum(value**2 for value in values) / len(values) == pytest.approx(1, abs=1e-4) and abs(sum(values)) < 1e-9
