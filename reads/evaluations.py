"""The evaluations of a run with their mean rewards."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import Purpose
from store.columns import columns_of
from store.schema import EvaluationTable, RolloutGroupTable, RolloutTable


@dataclass(slots=True, frozen=True)
class EvaluationRate:
    """An evaluation. `mean`: over its tasks, of each task's mean reward.

    `num_rated_tasks`: the tasks with a verdict; the mean is over them. `num_graded`: the rollouts with a verdict.
    `lowest` and `highest`: of the rewards.
    """

    label: str
    step: int
    temperature: float
    num_samples: int
    policy_version: str
    num_tasks: int
    num_rated_tasks: int
    num_rollouts: int
    num_graded: int
    mean: float | None
    deviation: float | None
    created_at: datetime
    ended_at: datetime | None
    lowest: float = 0.0
    highest: float = 1.0


async def evaluation_rates(connection: AsyncConnection, run_id: str) -> list[EvaluationRate]:
    """Return the run's evaluations. `deviation` is the standard deviation of the tasks' means."""
    per_task = (
        select(
            RolloutGroupTable.label,
            RolloutTable.task_id,
            func.avg(RolloutTable.reward).label("mean"),
            func.count().label("rollouts"),
            func.count(RolloutTable.reward).label("graded"),
            func.min(RolloutTable.reward).label("lowest"),
            func.max(RolloutTable.reward).label("highest"),
        )
        .join(RolloutTable, RolloutTable.group_id == RolloutGroupTable.id)
        .where(
            RolloutGroupTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.EVAL,
            RolloutTable.replaced_by.is_(None),
        )
        .group_by(RolloutGroupTable.label, RolloutTable.task_id)
        .subquery()
    )
    rates = (
        select(
            per_task.c.label,
            func.count().label("tasks"),
            func.count(per_task.c.mean).label("rated"),
            func.sum(per_task.c.rollouts).label("rollouts"),
            func.sum(per_task.c.graded).label("graded"),
            func.avg(per_task.c.mean).label("mean"),
            func.stddev_samp(per_task.c.mean).label("deviation"),
            func.min(per_task.c.lowest).label("lowest"),
            func.max(per_task.c.highest).label("highest"),
        )
        .group_by(per_task.c.label)
        .subquery()
    )
    columns = columns_of(
        EvaluationRate,
        EvaluationTable,
        num_tasks=func.coalesce(rates.c.tasks, 0),
        num_rated_tasks=func.coalesce(rates.c.rated, 0),
        num_rollouts=cast(func.coalesce(rates.c.rollouts, 0), Integer),
        num_graded=cast(func.coalesce(rates.c.graded, 0), Integer),
        mean=rates.c.mean,
        deviation=rates.c.deviation,
        lowest=func.coalesce(rates.c.lowest, 0.0),
        highest=func.coalesce(rates.c.highest, 1.0),
    )
    statement = (
        select(*columns)
        .outerjoin(rates, rates.c.label == EvaluationTable.label)
        .where(EvaluationTable.run_id == run_id)
        .order_by(EvaluationTable.step, EvaluationTable.label)
    )
    return [EvaluationRate(*row) for row in await connection.execute(statement)]
