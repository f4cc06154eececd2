"""A training run whose second group is a fork of a rollout of its first one, up to the plan of a step."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import func, select

from reads.rollouts import describe_rollout
from store.schema import BatchItemTable, RolloutGroupTable, RolloutTable, TurnTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training
from tests.integration.workflows.test_rollout import call
from training.planner import load_sequences, load_step_plan

pytestmark = pytest.mark.timeout(600)
FIRST, FIX, STOP, DONE = call("echo two > b.txt"), call("echo right > a.txt"), "I stop here.", "Done."


@pytest.fixture
async def training(loop: Loop) -> AsyncIterator[Training]:
    found = Training(loop)
    yield found
    await found.cancel()


async def test_a_group_of_forks_is_trained(training: Training, loop: Loop) -> None:
    """The first group has no signal, so its place is taken by a fork of one of its members at the second turn. The
    first command runs again in the box of each fork, without a call of the engine; one of them solves the task.
    """
    own = {"max_groups_seen": 2, "forks": {"share": 1.0}}
    await training.begin(FIRST, FIRST, eval_cmd='test "$(cat a.txt)" = right', **own)
    await loop.until(lambda: in_flight(training, 2), "both agents have asked")
    await loop.script("I give up.", "I give up.", STOP, FIX, DONE)
    await training.let_go()
    plan = await loop.until(lambda: planned(training), "a step is planned")

    plain, fork = await groups(training)
    assert (plain.use, plain.forked_turn_id, fork.use) == ("no_signal", None, "trained")
    assert all(member.is_fork and member.group_id == fork.id for member in plan.members)
    assert sorted((member.reward, member.advantage) for member in plan.members) == [(0.0, -0.5), (1.0, 0.5)]
    ids = {member.reward: member.rollout_id for member in plan.members}
    async with loop.database.begin() as connection:
        stories = {reward: await describe_rollout(connection, one) for reward, one in ids.items()}
        sequences = await load_sequences(connection, list(ids.values()), plan.min_policy_step)
    turns = {reward: [turn["logprobs_valid"] for turn in story["turns"]] for reward, story in stories.items()}
    assert turns == {0.0: [False, True], 1.0: [False, True, True]}
    for story in stories.values():
        assert "+two" in story["patches"][0]["diff"]
        assert story["rollout"]["forked_from"] in [row.id for row in await training.rows()][:2]
    context = [loop.tokenizer.decode(one.ids[~one.mask].tolist(), skip_special_tokens=False) for one in sequences]
    trained = {one.rollout_id: loop.tokenizer.decode(one.ids[one.mask].tolist()) for one in sequences}
    assert all(FIRST in one for one in context)
    assert trained == {ids[0.0]: STOP, ids[1.0]: FIX + DONE}


async def in_flight(training: Training, count: int) -> bool:
    statement = select(func.count()).select_from(TurnTable).join(RolloutTable, RolloutTable.id == TurnTable.rollout_id)
    statement = statement.where(RolloutTable.run_id == training.run_id, TurnTable.state == "in_flight")
    async with training.loop.database.begin() as connection:
        return (await connection.execute(statement)).scalar_one() == count


async def planned(training: Training) -> Any:
    async with training.loop.database.begin() as connection:
        return await load_step_plan(connection, training.run_id, 1)


async def groups(training: Training) -> list[Any]:
    """Return the run's groups that the step has consumed, oldest first."""
    columns = (RolloutGroupTable.id, RolloutGroupTable.forked_turn_id, BatchItemTable.use)
    statement = select(*columns).join(BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id)
    statement = statement.where(BatchItemTable.run_id == training.run_id).order_by(RolloutGroupTable.group_no)
    async with training.loop.database.begin() as connection:
        return list(await connection.execute(statement))
