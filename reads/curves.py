"""The metrics of a run by step, and the rewards of each step with their spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import orjson
from sqlalchemy import ColumnElement, Text, cast, exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store import plans
from store.schema import BatchItemTable, BatchTable, MetricTable, RolloutGroupTable, RunTable

Metrics = dict[str, float]
_ALARM = "alarm_"
FIGURES = {
    "trained_tokens": "trained tokens {:,.0f}",
    "rollouts": "rollouts {:.0f}",
    "reward_mean": "mean reward of trained groups {:.3f}",
    "loss": "loss {:.4g}",
    "grad_norm": "gradient norm {:.3g} before clipping",
    "entropy": "entropy {:.3f}",
    "masked_fraction": "tokens without gradient {:.1%}",
    "staleness_mean": "mean staleness {:.2f} steps",
    "mismatch_max": "largest gap between the learner's and the recorded logprob {:.3f} nats",
}
"""Name of a metric -> how it is said."""


@dataclass(slots=True, frozen=True)
class StepTimes:
    """The times at which a step was planned and first trained, and the state of its plan row. `epoch`: of the learner
    that trained it."""

    step: int
    state: str
    planned_at: datetime
    stepped_at: datetime | None
    epoch: int | None


@dataclass(slots=True, frozen=True)
class StepReward:
    """Rewards of the groups that a step consumed. `mean` and `deviation`: of the groups' mean rewards; `lowest` and
    `highest`: of the rewards."""

    step: int
    num_rollouts: int
    num_groups: int
    mean: float
    deviation: float | None
    lowest: float = 0.0
    highest: float = 1.0


@dataclass(slots=True, frozen=True)
class RaisedAlarm:
    """An alarm of the learner: the steps that raised it, newest first, and whether the newest step did."""

    name: str
    steps: list[int]
    is_current: bool


def raised_alarms(metrics: Mapping[int, Metrics]) -> list[RaisedAlarm]:
    """Return the alarms in the metrics of some steps, those of the newest step first."""
    raised: dict[str, list[int]] = {}
    for step in sorted(metrics, reverse=True):
        for name, value in metrics[step].items():
            if name.startswith(_ALARM) and value:
                raised.setdefault(name.removeprefix(_ALARM), []).append(step)
    newest = max(metrics, default=0)
    alarms = [RaisedAlarm(name, steps, steps[0] == newest) for name, steps in raised.items()]
    return sorted(alarms, key=lambda one: (not one.is_current, one.name))


async def newest_metric_step(connection: AsyncConnection, run_id: str) -> int:
    """Return the newest step with metrics; 0 without one."""
    statement = select(MetricTable.step).where(MetricTable.run_id == run_id).order_by(MetricTable.step.desc()).limit(1)
    return (await connection.execute(statement)).scalar_one_or_none() or 0


async def metrics_by_step(connection: AsyncConnection, run_id: str, first: int, last: int) -> dict[int, Metrics]:
    """Return the metrics of the steps first to last, inclusive.

    One row per name with arrays, because a run of 400 steps has thousands of values.
    """
    statement = select(MetricTable.name, func.array_agg(MetricTable.step), func.array_agg(MetricTable.value)).where(
        MetricTable.run_id == run_id, MetricTable.step.between(first, last)
    )
    found: dict[int, Metrics] = {}
    for name, steps, values in await connection.execute(statement.group_by(MetricTable.name)):
        for step, value in zip(steps, values, strict=True):
            found.setdefault(step, {})[name] = value
    return {step: found[step] for step in sorted(found)}


async def trained_tokens_before(connection: AsyncConnection, run_id: str, step: int) -> float:
    statement = select(func.coalesce(func.sum(MetricTable.value), 0.0)).where(
        MetricTable.run_id == run_id, MetricTable.name == "trained_tokens", MetricTable.step < step
    )
    return float((await connection.execute(statement)).scalar_one())


async def times_by_step(connection: AsyncConnection, run_id: str, first: int, last: int) -> dict[int, StepTimes]:
    columns = (BatchTable.step, BatchTable.state, BatchTable.planned_at, plans.first_trained_at(), BatchTable.epoch)
    statement = select(*columns).where(BatchTable.run_id == run_id, BatchTable.step.between(first, last))
    return {row.step: StepTimes(*row) for row in await connection.execute(statement.order_by(BatchTable.step))}


async def rewards_by_step(connection: AsyncConnection, run_id: str, first: int, last: int) -> list[StepReward]:
    """Return the rewards with which each step consumed its groups, also those without signal, without forks."""
    of_run = (BatchItemTable.run_id == run_id) & BatchItemTable.step.between(first, last)
    return [one for _, one in await _rewards(connection, of_run)]


async def newest_rewards(connection: AsyncConnection, run_ids: Sequence[str]) -> dict[str, StepReward]:
    """Return the rewards of each run's newest trained step, by run, as `rewards_by_step` does."""
    newest = (RunTable.run_id == BatchItemTable.run_id) & (RunTable.step == BatchItemTable.step)
    return dict(await _rewards(connection, exists().where(newest, RunTable.run_id.in_(run_ids))))


async def _rewards(connection: AsyncConnection, condition: ColumnElement[bool]) -> list[tuple[str, StepReward]]:
    keys = (BatchItemTable.run_id, BatchItemTable.step)
    statement = (
        select(*keys, func.string_agg(cast(BatchItemTable.rewards, Text), ","))
        .join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
        .where(
            RolloutGroupTable.forked_turn_id.is_(None),
            condition,
            BatchItemTable.use != "expired",
            BatchItemTable.rewards != [],
        )
        .group_by(*keys)
        .order_by(*keys)
    )
    found = []
    for run_id, step, listed in await connection.execute(statement):
        groups = orjson.loads(f"[{listed}]")
        means = np.array([sum(one) / len(one) for one in groups])
        rewards = [float(one) for each in groups for one in each]
        spread = float(means.std(ddof=1)) if len(groups) > 1 else None
        one = StepReward(step, len(rewards), len(groups), float(means.mean()), spread, min(rewards), max(rewards))
        found.append((run_id, one))
    return found
