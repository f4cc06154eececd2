"""The metrics of a run by step, and the rewards of each step with their spread."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store import plans
from store.schema import BatchItemTable, BatchTable, MetricTable, RolloutGroupTable, RolloutTable

Metrics = dict[str, float]
_ALARM = "alarm_"


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
    """Return the rewards of all groups that each step consumed, also of those without signal, without forks."""
    group = (
        select(
            BatchItemTable.step,
            BatchItemTable.group_id,
            func.count(RolloutTable.reward).label("number"),
            func.avg(RolloutTable.reward).label("mean"),
            func.min(RolloutTable.reward).label("lowest"),
            func.max(RolloutTable.reward).label("highest"),
        )
        .join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
        .join(RolloutTable, RolloutTable.group_id == BatchItemTable.group_id)
        .where(
            RolloutGroupTable.forked_turn_id.is_(None),
            BatchItemTable.run_id == run_id,
            BatchItemTable.step.between(first, last),
            BatchItemTable.use != "expired",
            RolloutTable.reward.is_not(None),
            RolloutTable.late.is_(False),
            RolloutTable.replaced_by.is_(None),
        )
        .group_by(BatchItemTable.step, BatchItemTable.group_id)
        .subquery()
    )
    spread = (func.avg(group.c.mean), func.stddev_samp(group.c.mean), func.min(group.c.lowest))
    number = cast(func.sum(group.c.number), Integer)
    statement = select(group.c.step, number, func.count(), *spread, func.max(group.c.highest))
    statement = statement.group_by(group.c.step).order_by(group.c.step)
    return [StepReward(*row) for row in await connection.execute(statement)]
