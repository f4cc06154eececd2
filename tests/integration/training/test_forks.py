"""Training groups that are forks of earlier rollouts: their choice, their plan rows, and what they leave out."""

from dataclasses import replace
from typing import Any, cast

import pytest
from sqlalchemy import select, update
from temporalio.client import Client

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities, next_tasks
from ratchet.payloads import ViewRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import Purpose
from reads.curves import rewards_by_step
from scheduling.fork_selection import with_forks
from scheduling.quarantine import quarantined_tasks
from store import runs
from store.database import Database
from store.forks import forkable_turns
from store.groups import NewGroup
from store.runs import OrderedTask
from store.schema import RolloutGroupTable, RolloutTable, TurnTable
from tests.integration.training.records import make_config, make_group, make_run
from training.metrics import reward_metrics
from training.planner import load_step_plan, plan_step

ATTEMPT = [{"attempt": 1}] * 4


def new_groups(run_id: str, count: int, published: int = 1) -> list[NewGroup]:
    plain = NewGroup(run_id, 0, 0, Purpose.TRAIN, 4, 2, 1.0, published, "")
    return [replace(plain, group_no=100 + n, workflow_id=f"group/{run_id}/{100 + n}") for n in range(count)]


async def make(database: Database, run_id: str, *made: dict[str, Any], **training: Any) -> Any:
    """Make a run with these groups, all rollouts of which have ended, and return its config."""
    config = make_config(training={"forks": {"share": 1.0}, "max_staleness": 0} | training)
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        for number, group in enumerate(made):
            await make_group(
                connection, run_id, number, **{"rewards": [1.0, 0.0, 0.0, 0.0], "members": ATTEMPT} | group
            )
    return config


async def sources(database: Database, run_id: str) -> dict[int, tuple[int, int, int]]:
    """Return turn → group number, member and task of its rollout."""
    found = select(TurnTable.id, RolloutGroupTable.group_no, RolloutTable.member, RolloutTable.task_id)
    found = found.join(RolloutTable, RolloutTable.id == TurnTable.rollout_id)
    found = found.join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
    async with database.begin() as connection:
        rows = await connection.execute(found.where(RolloutTable.run_id == run_id, TurnTable.parent_turn_id > 0))
        return {row[0]: (row[1], row[2], row[3]) for row in rows}


async def test_the_same_rows_give_the_same_forks(database: Database, run_id: str) -> None:
    config = await make(database, run_id, {}, {})
    known = await sources(database, run_id)
    async with database.begin() as connection:
        found = await with_forks(connection, new_groups(run_id, 4), config, ())
        assert found == await with_forks(connection, new_groups(run_id, 4), config, ())
        assert found[2:3] != await with_forks(connection, new_groups(run_id, 3)[2:], replace_seed(config, 1), ())
    turns = [one.forked_turn_id for one in found]
    assert len(set(turns)) == 4 and None not in turns
    assert [one.task_id for one in found] == [known[one.forked_turn_id or 0][2] for one in found]


def replace_seed(config: Any, seed: int) -> Any:
    return config.model_copy(update={"seed": seed})


async def test_a_share_of_the_groups_are_forks(database: Database, run_id: str) -> None:
    config = await make(database, run_id, *[{}] * 8, forks={"share": 0.5})
    async with database.begin() as connection:
        found = await with_forks(connection, new_groups(run_id, 40), config, ())
        none = config.training.model_copy(update={"forks": config.training.forks.model_copy(update={"share": 0.0})})
        plain = new_groups(run_id, 40)
        assert await with_forks(connection, plain, config.model_copy(update={"training": none}), ()) == plain
    assert 12 < sum(one.forked_turn_id is not None for one in found) < 28


@pytest.mark.parametrize(
    ("members", "published", "staleness", "expected"),
    [
        ([{}, {"late": True}, {"replaced_by": 1}, {"outcome": "rejected"}], 1, 0, {0}),
        ([{}, {"outcome": "infra_failed", "reward": None}, {}, {}], 1, 0, {0, 2, 3}),
        ([{}] * 4, 2, 0, set()),
        ([{}] * 4, 2, 2, {0, 1, 2, 3}),
        ([{}] * 4, 3, 2, set()),
    ],
)
async def test_sources_are_graded_and_recent(
    database: Database, run_id: str, members: list[dict[str, Any]], published: int, staleness: int, expected: set[int]
) -> None:
    """The group was made under weights 0."""
    rows = [{"attempt": 1} | one for one in members]
    config = await make(database, run_id, {"members": rows}, max_staleness=staleness)
    known = await sources(database, run_id)
    async with database.begin() as connection:
        found = await with_forks(connection, new_groups(run_id, 8, published), config, ())
    turns = [one.forked_turn_id for one in found if one.forked_turn_id is not None]
    assert {known[one][1] for one in turns} == expected
    assert [one.task_id for one in found if one.forked_turn_id is None] == [0] * (8 - len(turns))


async def test_mixed_leaves_out_groups_of_equal_rewards(database: Database, run_id: str) -> None:
    forks = {"share": 1.0, "turn": "mixed"}
    config = await make(database, run_id, {"rewards": [1.0] * 4}, {}, {"rewards": [0.0] * 4}, forks=forks)
    known = await sources(database, run_id)
    async with database.begin() as connection:
        found = await with_forks(connection, new_groups(run_id, 4), config, ())
    assert {known[one.forked_turn_id][0] for one in found if one.forked_turn_id} == {1}


async def test_forks_are_not_forked_and_no_turn_is_forked_twice(database: Database, run_id: str) -> None:
    config = await make(database, run_id, {}, {})
    known = await sources(database, run_id)
    async with database.begin() as connection:
        await connection.execute(
            update(RolloutGroupTable).where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.group_no == 1)
            .values(forked_turn_id=min(known))
        )  # fmt: skip
        found = await with_forks(connection, new_groups(run_id, 12), config, ())
    turns = [one.forked_turn_id for one in found if one.forked_turn_id is not None]
    assert {known[one][0] for one in turns} == {0} and min(known) not in turns
    assert len(turns) == len(set(turns))


async def test_a_group_of_forks_is_planned_like_any_other(database: Database, run_id: str) -> None:
    """Its advantages are among its own members, and its mean reward is no part of the training reward."""
    config = await make(database, run_id, {}, {"rewards": [1.0, 1.0, 0.0, 1.0]})
    async with database.begin() as connection:
        turn_id = min(await sources(database, run_id))
        forked = update(RolloutGroupTable).where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.group_no == 1)
        await connection.execute(forked.values(forked_turn_id=turn_id))
        assert await plan_step(connection, run_id, config) == 1
        planned = await load_step_plan(connection, run_id, 1)
    assert planned is not None
    assert [member.advantage for member in planned.members if member.is_fork] == [0.25, 0.25, -0.75, 0.25]
    assert [member.advantage for member in planned.members if not member.is_fork] == [0.75, -0.25, -0.25, -0.25]
    found = reward_metrics(planned.members)
    assert (found["reward_mean"], found["fork_reward_mean"], found["groups"]) == (0.25, 0.75, 2)
    only = reward_metrics([member for member in planned.members if member.is_fork])
    assert only["fork_reward_mean"] == 0.75 and "reward_mean" not in only


async def test_the_curve_and_the_metric_agree(database: Database, run_id: str) -> None:
    """The third group is a fork. A step of forks alone has neither."""
    config = await make(database, run_id, {}, {"rewards": [1.0, 1.0, 0.0, 1.0]}, {"rewards": [0.0, 1.0, 1.0, 1.0]})
    config = config.model_copy(update={"training": config.training.model_copy(update={"groups_per_step": 3})})
    of_run = update(RolloutGroupTable).where(RolloutGroupTable.run_id == run_id)
    async with database.begin() as connection:
        forked = of_run.values(forked_turn_id=min(await sources(database, run_id)))
        await connection.execute(forked.where(RolloutGroupTable.group_no == 2))
        assert await plan_step(connection, run_id, config) == 1
        planned = await load_step_plan(connection, run_id, 1)
        (shown,) = await rewards_by_step(connection, run_id, 1, 1)
        await connection.execute(forked)
        assert await rewards_by_step(connection, run_id, 1, 1) == []
    assert planned is not None
    assert (shown.mean, shown.num_groups) == (reward_metrics(planned.members)["reward_mean"], 2) == (0.5, 2)


async def test_no_new_groups_are_no_forks(database: Database, run_id: str) -> None:
    config = await make(database, run_id, {})
    async with database.begin() as connection:
        assert await with_forks(connection, [], config, ()) == []


async def test_tasks_in_quarantine_are_no_sources(database: Database, run_id: str) -> None:
    """Groups 0, 4, 6, 8 are of one task; the last three failed while others got their verdicts."""
    config = await make(database, run_id, *[{}] * 9, groups_per_step=2)
    known = await sources(database, run_id)
    of_run = update(RolloutGroupTable).where(RolloutGroupTable.run_id == run_id)
    task_id = min(task for _, _, task in known.values())
    async with database.begin() as connection:
        failed = of_run.where(RolloutGroupTable.group_no.in_([4, 6, 8])).values(task_id=task_id, state="failed")
        await connection.execute(failed)
        left_out = [one.task_id for one in await quarantined_tasks(connection, run_id, 2)]
        found = await with_forks(connection, new_groups(run_id, 40), config, left_out)
    turns = {one.forked_turn_id for one in found if one.forked_turn_id is not None}
    assert {known[one][0] for one in turns} == {1, 2, 3, 5, 7}


@pytest.mark.parametrize(("forked", "expected"), [((), True), ((4,), False), ((9,), True)])
async def test_forks_count_neither_as_failures_nor_as_successes(
    database: Database, run_id: str, forked: tuple[int, ...], expected: bool
) -> None:
    """Groups 4, 6 and 8 of one task failed; group 9, of the same, succeeded only if it is a fork."""
    await make(database, run_id, *[{}] * (9 + (9 in forked)))
    group = RolloutGroupTable
    of_run = update(group).where(group.run_id == run_id)
    async with database.begin() as connection:
        task_id = min(task for _, _, task in (await sources(database, run_id)).values())
        await connection.execute(of_run.where(group.group_no.in_([4, 6, 8, 9])).values(task_id=task_id))
        await connection.execute(of_run.where(group.group_no.in_([4, 6, 8])).values(state="failed"))
        await connection.execute(of_run.where(group.group_no.in_(forked)).values(forked_turn_id=1))
        found = await quarantined_tasks(connection, run_id, 2)
    assert [one.task_id for one in found] == [task_id] * expected


@pytest.mark.parametrize(
    ("rule", "read"), [("uniform", ""), ("mixed", ""), ("entropy", "logprobs"), ("first_edit", "answer")]
)
async def test_only_what_the_rule_reads_is_loaded(database: Database, run_id: str, rule: str, read: str) -> None:
    await make(database, run_id, {})
    async with database.begin() as connection:
        found = select(RolloutTable.id).where(RolloutTable.run_id == run_id).limit(1)
        rollout_id = (await connection.execute(found)).scalar_one()
        of_rollout = update(TurnTable).where(TurnTable.rollout_id == rollout_id)
        await connection.execute(of_rollout.values(answer=b"answer", logprobs=b"logprobs"))
        turns = await forkable_turns(connection, rollout_id, rule)
    assert turns and all(one.answer.decode() == ("answer" if read == "answer" else "") for one in turns)
    assert all(one.logprobs.decode() == ("logprobs" if read == "logprobs" else "") for one in turns)


async def test_the_run_makes_forks_and_tries_tasks_by_plain_groups_alone(database: Database, run_id: str) -> None:
    config = await make(database, run_id, {}, {}, solve_rates=[0.2, 0.9], groups_per_step=4)
    settings = load_temporal_settings()
    activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None))
    async with database.begin() as connection:
        of_run = select(RolloutGroupTable.task_id).where(RolloutGroupTable.run_id == run_id)
        tasks = list((await connection.execute(of_run.order_by(RolloutGroupTable.group_no))).scalars())
        await runs.set_task_order(connection, run_id, Purpose.TRAIN, [OrderedTask(one, 0) for one in tasks])
        await runs.take_group_numbers(connection, run_id, 2)
    view = await activities.advance_run(ViewRunInput(run_id=run_id))
    assert len(view.open_groups) == 2
    async with database.begin() as connection:
        made = select(RolloutGroupTable).where(RolloutGroupTable.id.in_([one.group_id for one in view.open_groups]))
        rows = (await connection.execute(made)).all()
        known = await sources(database, run_id)
        assert all(known[row.forked_turn_id][2] == row.task_id and row.size == 4 for row in rows)
        of_forks = RolloutTable.group_id.in_([row.id for row in rows])
        await connection.execute(update(RolloutTable).where(of_forks).values(outcome="graded", reward=1.0))
        picked = await next_tasks(connection, run_id, config, 1, 4, 2, ())
    assert [one.task_id for one in picked] == tasks, "each has a mean reward of 0.25, without the forks' 1.0"
