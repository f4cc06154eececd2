"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from collections.abc import Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from reads.curves import Metrics, raised_alarms
from reads.reward_explanation import explain_reward
from reads.rollouts import read_rollout_facts, require_rollout
from reads.run_facts import RunFacts, read_run_facts
from reads.runs import OutcomeCount, require_run
from reads.steps import StepFacts, read_step_facts
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
        return explain_run(await read_run_facts(connection, await require_run(connection, named.run_id)))
    if (facts := await read_step_facts(connection, named.run_id, named.id)) is None:
        raise ConfigError(f"run {named.run_id} has no step {named.id} yet")
    return explain_step(facts)


def explain_run(facts: RunFacts) -> list[str]:
    """Say how far the run is, whether it learns, how its rollouts ended and what is wrong with it."""
    head = facts.run
    reason = f": {head.state_reason}" if head.state_reason else ""
    said = [f"{head.run_id} is {head.state} at step {head.step} of {facts.num_steps}{reason}."]
    if head.config_name == ADHOC:
        said = [f"{head.run_id} holds rollouts by hand; it trains nothing."]
    before, now = _mean(facts.first, "reward_mean"), _mean(facts.last, "reward_mean")
    if before is not None and now is not None:
        steps = f"{_range(facts.first)} to {now:.3f} in {_range(facts.last)}"
        said.append(
            f"The mean reward of trained groups went from {before:.3f} in {steps}; only groups with signal count."
        )
    signal = _mean(facts.last, "groups_with_signal_fraction")
    if signal is not None:
        said.append(f"In {_range(facts.last)}, {signal:.0%} of the groups had signal: rewards that differ.")
    for one in facts.evaluations:
        if one.mean is not None:
            state = "" if one.ended_at else ", still running"
            said.append(
                f"Evaluation {one.label} at step {one.step} (T={one.temperature:g}): {one.mean:.3f} over "
                f"{one.num_rated_tasks} tasks, {one.num_graded} of {one.num_rollouts} rollouts with a verdict{state}."
            )
    said.append(_outcomes(facts.outcomes))
    said += [
        f"{one.number} ended as {one.outcome}: {one.reason} (newest: rollout {one.newest})."
        for one in facts.failures[:_MAX_LISTED]
    ]
    said += _alarms(facts.last)
    return said


def explain_step(facts: StepFacts) -> list[str]:
    """Say what the step trained, what it left out, and which tokens had the largest ratios."""
    head, metrics = facts.step, facts.metrics
    uses: dict[str, int] = {}
    for group in facts.groups:
        uses[group.use or "unused"] = uses.get(group.use or "unused", 0) + 1
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
    return said + _alarms({head.step: metrics})


def _outcomes(outcomes: Sequence[OutcomeCount]) -> str:
    counts: dict[str, int] = {}
    for one in outcomes:
        name = (one.outcome or "open").replace("_", " ")
        counts[name] = counts.get(name, 0) + one.number
    listed = ", ".join(f"{number} {name}" for name, number in sorted(counts.items(), key=lambda item: -item[1]))
    return f"Its {sum(counts.values())} rollouts: {listed}." if counts else "It has no rollouts yet."


def _alarms(metrics: Mapping[int, Metrics]) -> list[str]:
    return [f"Alarm {one.name} in step {', '.join(map(str, sorted(one.steps)))}." for one in raised_alarms(metrics)]


def _mean(metrics: Mapping[int, Metrics], name: str) -> float | None:
    values = [one[name] for one in metrics.values() if name in one]
    return sum(values) / len(values) if values else None


def _range(metrics: Mapping[int, Metrics]) -> str:
    first, last = min(metrics), max(metrics)
    return f"step {first}" if first == last else f"steps {first} to {last}"
