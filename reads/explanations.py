"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from collections import Counter

from sqlalchemy.ext.asyncio import AsyncConnection

from reads.curves import raised_alarms
from reads.reward_explanation import explain_reward
from reads.rollouts import read_rollout_facts, require_rollout
from reads.runs import RunHead, require_run
from reads.steps import StepFacts, require_step
from reads.vitals import read_vitals
from store.names import Kind, require_named
from store.runs import ADHOC

_MAX_LISTED = 3
_FIGURES = {
    "trained_tokens": "Trained tokens {:,.0f}",
    "rollouts": "rollouts {:.0f}",
    "reward_mean": "mean reward {:.3f}",
    "loss": "loss {:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "entropy": "entropy {:.3f}",
    "masked_fraction": "tokens without gradient {:.1%}",
    "staleness_mean": "mean staleness {:.2f} steps",
    "mismatch_max": "largest gap between the learner's and the recorded logprob {:.3f} nats",
}
"""Name of a metric -> how it is said."""


async def explain_thing(connection: AsyncConnection, what: str) -> list[str]:
    """Return the sentences about a rollout, a step or a run with this name (`store.names`).

    Raises ConfigError if it does not exist.
    """
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
    is_by_hand = head.config_name == ADHOC
    said = [
        f"{head.run_id} "
        + ("holds rollouts by hand; it trains nothing." if is_by_hand else f"is {head.state}{reason}.")
    ]
    vitals = await read_vitals(connection, head)
    said += [f"{one.sentence()}." for one in vitals.facts]
    for kind in ("error", "test", "command"):
        largest = [one for one in vitals.failures if one.kind == kind][:_MAX_LISTED]
        said += [f"Failures by {one.sentence()}." for one in largest]
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
    said.append("; ".join(words.format(metrics[name]) for name, words in _FIGURES.items() if name in metrics) + ".")
    for one in facts.tokens[:_MAX_LISTED]:
        command = facts.command_of(one)
        wrote = f" in `{command}`" if command else ""
        said.append(
            f"Token {one.token_id} at position {one.position} of rollout {one.rollout_id}, turn {one.turn_id}{wrote}: "
            f"recorded logprob {one.behaviour:.3f}, learner's {one.logprob:.3f}."
        )
    return said + [f"Alarm {one.name}." for one in raised_alarms({head.step: metrics})]
