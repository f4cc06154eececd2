"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from collections import Counter

from sqlalchemy.ext.asyncio import AsyncConnection

from reads.curves import FIGURES, raised_alarms
from reads.reward_explanation import explain_reward
from reads.rollouts import read_rollout_facts, require_rollout
from reads.runs import RunHead, require_run
from reads.steps import StepFacts, require_step
from reads.vitals import read_vitals
from store.names import Kind, require_named
from store.runs import ADHOC

_MAX_LISTED = 3


async def explain_thing(connection: AsyncConnection, what: str) -> list[str]:
    """Return the sentences about a rollout, a step or a run with this name (`store.names`). Raises ConfigError if it
    does not exist."""
    named = await require_named(connection, what, Kind.ROLLOUT, Kind.STEP, Kind.RUN)
    if named.kind is Kind.ROLLOUT:
        rollout = await read_rollout_facts(connection, await require_rollout(connection, named.id))
        return [one.text for one in explain_reward(rollout)]
    if named.kind is Kind.RUN:
        return await explain_run(connection, await require_run(connection, named.run_id))
    return explain_step(await require_step(connection, named.run_id, named.id))


async def explain_run(connection: AsyncConnection, head: RunHead) -> list[str]:
    """Say how the run is, in the words of its page, and what its failed rollouts share."""
    reason = f": {head.state_reason}" if head.state_reason else ""
    said = [f"{head.run_id} is {head.state}{reason}."]
    if head.config_name == ADHOC:
        said = [f"{head.run_id} holds rollouts by hand; it trains nothing."]
    vitals = await read_vitals(connection, head)
    said += [f"{one.sentence()}." for one in vitals.facts]
    for kind in ("error", "test", "command"):
        largest = vitals.failures.of_kind(kind)[:_MAX_LISTED]
        said += [f"Failures by {one.sentence(vitals.failures.hour)}." for one in largest]
    return said


def explain_step(facts: StepFacts) -> list[str]:
    """Say what the step trained, what it left out, and which tokens had the largest ratios."""
    head, metrics = facts.step, facts.metrics
    uses = Counter(group.use or "unused" for group in facts.groups)
    groups = ", ".join(f"{number} {use.replace('_', ' ')}" for use, number in sorted(uses.items()))
    said = [f"Step {head.step} is {head.state}; of its groups: {groups or 'none'}."]
    said += [f"{plan.sentence().rstrip('.')}." for plan in facts.discarded]
    if not metrics:
        return [*said, "The learner has not trained it yet."]
    said.append("; ".join(words.format(metrics[name]) for name, words in FIGURES.items() if name in metrics) + ".")
    for one in facts.tokens[:_MAX_LISTED]:
        command = facts.command_of(one)
        wrote = f" in `{command}`" if command else ""
        said.append(
            f"Token {one.token_id} at position {one.position} of rollout {one.rollout_id}, turn {one.turn_id}{wrote}: "
            f"recorded logprob {one.behaviour:.3f}, learner's {one.logprob:.3f}."
        )
    return said + [f"Alarm {one.name}." for one in raised_alarms({head.step: metrics})]
