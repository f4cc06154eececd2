"""A generate function of the user's own: graded, recorded and trained as every rollout, and repeated as a whole."""

from typing import Any

import pytest
from sqlalchemy import func, select

from store import chains
from store.schema import SandboxTable, TurnTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import PRE, TASK, call, finish

pytestmark = pytest.mark.timeout(600)


async def boxes_of(loop: Loop, rollout_id: int) -> dict[tuple[str, str], int]:
    async with loop.database.begin() as connection:
        columns = (SandboxTable.role, SandboxTable.state)
        found = select(*columns, func.count()).where(SandboxTable.rollout_id == rollout_id).group_by(*columns)
        return {(row.role, row.state): row.count for row in await connection.execute(found)}


async def trained_of(loop: Loop, rollout_id: int) -> int:
    """Return how many tokens a step would train, as the learner reads them."""
    async with loop.database.begin() as connection:
        return sum(int(one.trained.sum()) for one in await chains.read_chains(connection, [rollout_id]))


async def sampled_of(loop: Loop, rollout_id: int, attempt: int) -> int:
    async with loop.database.begin() as connection:
        sampled = select(func.sum(TurnTable.num_sampled)).where(TurnTable.rollout_id == rollout_id)
        return int((await connection.execute(sampled.where(TurnTable.attempt == attempt))).scalar_one() or 0)


def own(function: str) -> dict[str, Any]:
    return {"generate": f"tests.standins.generates:{function}"}


async def test_the_example_does_what_the_stages_do(loop: Loop) -> None:
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**TASK), harness={"generate": "examples.own_generate:generate"})
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns, row.num_chains) == ("graded", 1.0, "done", 2, 1)
    assert row.num_trained_tokens == await trained_of(loop, row.id) == await sampled_of(loop, row.id, 1) > 0
    assert await boxes_of(loop, row.id) == {("agent", "released"): 1, ("grade", "released"): 1}


async def test_a_killed_worker_repeats_the_function_in_new_boxes(loop: Loop) -> None:
    """The turns of the lost session do not count. A function that asks for no verdict is graded by the workflow."""
    await loop.script("echo lost > a.txt")
    await loop.script("never delivered", hold="worker")
    handle = await loop.start(loop.dataset(**TASK), harness=own("by_hand"))
    await loop.until_a_call_waits(handle)
    loop.end("worker", kill=True)
    await loop.release("worker")
    await loop.forget_script()
    await loop.script("cat draft.txt; echo two > a.txt", "true")
    loop.spawn("worker")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.attempt, row.num_turns) == ("graded", 1.0, 2, 2)
    assert row.num_trained_tokens == await trained_of(loop, row.id) == await sampled_of(loop, row.id, 2) > 0
    assert set(await boxes_of(loop, row.id)) == {("agent", "released"), ("grade", "released")}


@pytest.mark.parametrize("keeps", [False, True])
async def test_only_what_the_adapter_recorded_is_trained(loop: Loop, keeps: bool) -> None:
    await loop.script(call("echo two > a.txt"), "Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK, keeps=keeps), harness=own("alters")))
    assert (row.outcome, row.reward, row.num_turns) == ("graded", 1.0, 2)
    recorded = await sampled_of(loop, row.id, 1)
    assert row.num_trained_tokens == await trained_of(loop, row.id) == (recorded if keeps else 0)
    assert "not as recorded: sample 0 (loss_mask), sample 1 (tokens)" in row.outcome_reason
    assert row.outcome_reason.endswith("reward 0.7 is not used; one of your own is `grading.reward`")


async def test_a_function_without_a_model_call_gives_no_reward(loop: Loop) -> None:
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK), harness=own("makes_no_call")))
    assert (row.outcome, row.reward, row.attempt) == ("infra_failed", None, 3)
    assert "the function made no model call with `api_key`" in row.outcome_reason


async def test_a_function_that_fails_gives_no_reward_and_is_named(loop: Loop) -> None:
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK), harness=own("breaks")))
    assert (row.outcome, row.reward) == ("infra_failed", None)
    assert "'tests.standins.generates:breaks' failed: TypeError: replace() should be called on" in row.outcome_reason


async def test_an_error_of_a_stage_is_that_of_the_stage(loop: Loop) -> None:
    dataset = loop.dataset(pre_commands=[f"{PRE} && echo nope >&2 && exit 9"], eval_cmd="true")
    _, row = await finish(loop, await loop.start(dataset, harness=own("makes_no_call")))
    assert (row.outcome, row.reward) == ("infra_failed", None)
    assert "nope" in row.outcome_reason and "harness.generate" not in row.outcome_reason
