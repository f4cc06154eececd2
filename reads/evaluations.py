"""The evaluations of a run with their solve rates."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import Purpose
from store.columns import columns_of
from store.schema import EvaluationTable, RolloutGroupTable, RolloutTable


@dataclass(slots=True, frozen=True)
class EvaluationRate:
    """An evaluation with its solve rate: the mean over tasks of each task's mean reward.

    `num_rated_tasks`: the tasks with a verdict; the rate is over them. `num_graded`: the rollouts with a verdict.
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


async def evaluation_rates(connection: AsyncConnection, run_id: str) -> list[EvaluationRate]:
    """Return the run's evaluations. `deviation` is the standard deviation of the tasks' means."""
    per_task = (
        select(
            RolloutGroupTable.label,
            RolloutTable.task_id,
            func.avg(RolloutTable.reward).label("mean"),
            func.count().label("rollouts"),
            func.count(RolloutTable.reward).label("graded"),
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
    )
    statement = (
        select(*columns)
        .outerjoin(rates, rates.c.label == EvaluationTable.label)
        .where(EvaluationTable.run_id == run_id)
        .order_by(EvaluationTable.step, EvaluationTable.label)
    )
    return [EvaluationRate(*row) for row in await connection.execute(statement)]
