"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.run_names import step_number
from ratchet.stored_config import read_stored_config
from store import reports
from store.views import curve_views, evaluation_views, run_views, step_views, turn_views
from store.views.rollout_views import read_rollout_head
from viewer.models.conversation import main_command
from viewer.models.explanation import explain_reward
from viewer.models.run_story import RunFacts, StepFacts, explain_run, explain_step

_NUM_STEPS = 5
_MAX_FAILURES = 3


async def explain_thing(connection: AsyncConnection, what: str) -> list[str] | None:
    """Return the sentences about a rollout (its id or workflow id), RUN@STEP or RUN; None if it does not exist."""
    run_id, _, step = what.rpartition("@")
    if run_id and (number := step_number(step)) is not None:
        return await _explain_step(connection, run_id, number)
    if (rollout_id := await reports.find_rollout(connection, what)) is not None:
        return await _explain_rollout(connection, rollout_id)
    return await _explain_run(connection, what)


async def _explain_rollout(connection: AsyncConnection, rollout_id: int) -> list[str]:
    from viewer.routes.rollouts import read_reward_facts

    head = await read_rollout_head(connection, rollout_id)
    assert head is not None
    return [one.text for one in explain_reward(await read_reward_facts(connection, head))]


async def _explain_step(connection: AsyncConnection, run_id: str, step: int) -> list[str] | None:
    if (head := await step_views.read_step_head(connection, run_id, step)) is None:
        return None
    tokens = await step_views.read_step_tokens(connection, run_id, step)
    turns = await turn_views.read_turns(connection, {one.turn_id for one in tokens[:_NUM_STEPS]})
    metrics = (await curve_views.metrics_by_step(connection, run_id, step, step)).get(step, {})
    groups = await run_views.list_groups_of_step(connection, run_id, step)
    commands = {number: main_command(turn) for number, turn in turns.items()}
    discarded = await step_views.discarded_plans(connection, run_id, step)
    return explain_step(StepFacts(head, metrics, groups, tokens, commands, discarded))


async def _explain_run(connection: AsyncConnection, run_id: str) -> list[str] | None:
    if (head := await run_views.read_run_head(connection, run_id)) is None:
        return None
    last = await curve_views.newest_metric_step(connection, run_id)
    facts = RunFacts(
        head,
        read_stored_config(head.config).training.steps,
        await curve_views.metrics_by_step(connection, run_id, 1, min(last, _NUM_STEPS)),
        await curve_views.metrics_by_step(connection, run_id, max(1, last - _NUM_STEPS + 1), last),
        await run_views.count_outcomes(connection, run_id),
        await run_views.count_failures(connection, run_id, _MAX_FAILURES),
        await evaluation_views.evaluation_rates(connection, run_id),
    )
    return explain_run(facts)
