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

    `num_rated_tasks`: the tasks with a verdict; the mean is over them. `num_graded`: the rollouts with a verdict,
    `num_ended`: with an outcome. `lowest` and `highest`: of the rewards.
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
    num_ended: int = 0


async def evaluation_rates(connection: AsyncConnection, run_id: str) -> list[EvaluationRate]:
    """Return the run's evaluations. `deviation` is the standard deviation of the tasks' means."""
    per_task = (
        select(
            RolloutGroupTable.label,
            RolloutTable.task_id,
            func.avg(RolloutTable.reward).label("mean"),
            func.count().label("rollouts"),
            func.count(RolloutTable.reward).label("graded"),
            func.count(RolloutTable.outcome).label("ended"),
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
            func.count().label("num_tasks"),
            func.count(per_task.c.mean).label("num_rated_tasks"),
            cast(func.sum(per_task.c.rollouts), Integer).label("num_rollouts"),
            cast(func.sum(per_task.c.graded), Integer).label("num_graded"),
            cast(func.sum(per_task.c.ended), Integer).label("num_ended"),
            func.avg(per_task.c.mean).label("mean"),
            func.stddev_samp(per_task.c.mean).label("deviation"),
            func.min(per_task.c.lowest).label("lowest"),
            func.max(per_task.c.highest).label("highest"),
        )
        .group_by(per_task.c.label)
        .subquery()
    )
    counts = dict.fromkeys(("num_tasks", "num_rated_tasks", "num_rollouts", "num_graded", "num_ended"), 0)
    without = counts | {"lowest": 0.0, "highest": 1.0}
    found = {name: func.coalesce(rates.c[name], value) for name, value in without.items()}
    columns = columns_of(EvaluationRate, EvaluationTable, mean=rates.c.mean, deviation=rates.c.deviation, **found)
    statement = (
        select(*columns)
        .outerjoin(rates, rates.c.label == EvaluationTable.label)
        .where(EvaluationTable.run_id == run_id)
        .order_by(EvaluationTable.step, EvaluationTable.label)
    )
    return [EvaluationRate(*row) for row in await connection.execute(statement)]
