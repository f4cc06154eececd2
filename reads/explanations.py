"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.run_names import step_number
from ratchet.stored_config import read_stored_config
from reads.conversation import main_command
from reads.curves import metrics_by_step, newest_metric_step
from reads.evaluations import evaluation_rates
from reads.reward_explanation import explain_reward
from reads.rollouts import find_rollout, read_rollout_facts, read_rollout_head
from reads.run_story import RunFacts, StepFacts, explain_run, explain_step
from reads.runs import count_failures, count_outcomes, list_groups_of_step, read_run_head
from reads.steps import discarded_plans, read_step_head, read_step_tokens
from reads.turns import read_turns

_NUM_STEPS = 5
_MAX_FAILURES = 3


async def explain_thing(connection: AsyncConnection, what: str) -> list[str] | None:
    """Return the sentences about a rollout (its id or workflow id), RUN@STEP or RUN; None if it does not exist."""
    run_id, _, step = what.rpartition("@")
    if run_id and (number := step_number(step)) is not None:
        return await _explain_step(connection, run_id, number)
    if (rollout_id := await find_rollout(connection, what)) is not None:
        return await _explain_rollout(connection, rollout_id)
    return await _explain_run(connection, what)


async def _explain_rollout(connection: AsyncConnection, rollout_id: int) -> list[str]:
    head = await read_rollout_head(connection, rollout_id)
    assert head is not None
    return [one.text for one in explain_reward(await read_rollout_facts(connection, head))]


async def _explain_step(connection: AsyncConnection, run_id: str, step: int) -> list[str] | None:
    if (head := await read_step_head(connection, run_id, step)) is None:
        return None
    tokens = await read_step_tokens(connection, run_id, step)
    turns = await read_turns(connection, {one.turn_id for one in tokens[:_NUM_STEPS]})
    metrics = (await metrics_by_step(connection, run_id, step, step)).get(step, {})
    groups = await list_groups_of_step(connection, run_id, step)
    commands = {number: main_command(turn) for number, turn in turns.items()}
    discarded = await discarded_plans(connection, run_id, step)
    return explain_step(StepFacts(head, metrics, groups, tokens, commands, discarded))


async def _explain_run(connection: AsyncConnection, run_id: str) -> list[str] | None:
    if (head := await read_run_head(connection, run_id)) is None:
        return None
    last = await newest_metric_step(connection, run_id)
    facts = RunFacts(
        head,
        read_stored_config(head.config).training.steps,
        await metrics_by_step(connection, run_id, 1, min(last, _NUM_STEPS)),
        await metrics_by_step(connection, run_id, max(1, last - _NUM_STEPS + 1), last),
        await count_outcomes(connection, run_id),
        await count_failures(connection, run_id, _MAX_FAILURES),
        await evaluation_rates(connection, run_id),
    )
    return explain_run(facts)
