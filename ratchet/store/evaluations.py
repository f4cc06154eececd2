"""Evaluations: one policy version at one temperature over the held-out tasks, and what came out.

Why here: one file per aggregate; the figures that `ratchet train` prints are computed from these rows.
Called by: `activities/run_lifecycle.py` and the CLI.
"""

from typing import Any

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store import groups
from ratchet.store.schema import EvaluationTable, RolloutGroupTable, RolloutTable, TaskTable
from ratchet.types import Purpose


async def begin_evaluation(connection: AsyncConnection, values: dict[str, Any]) -> bool:
    """False where the evaluation exists already."""
    return (await connection.execute(insert(EvaluationTable).values(**values).on_conflict_do_nothing())).rowcount == 1


async def end_evaluation(connection: AsyncConnection, run_id: str, label: str) -> None:
    statement = update(EvaluationTable).where(
        EvaluationTable.run_id == run_id, EvaluationTable.label == label, EvaluationTable.ended_at.is_(None)
    )
    await connection.execute(statement.values(ended_at=func.now()))


async def ended_evaluations(connection: AsyncConnection, run_id: str) -> set[str]:
    statement = select(EvaluationTable.label).where(
        EvaluationTable.run_id == run_id, EvaluationTable.ended_at.is_not(None)
    )
    return set((await connection.execute(statement)).scalars())


def _of(run_id: str, label: str) -> ColumnElement[bool]:
    return and_(
        RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.EVAL, RolloutGroupTable.label == label
    )


async def open_evaluation_members(connection: AsyncConnection, run_id: str, label: str) -> list[tuple[int, str, str]]:
    """(rollout id, workflow id, task label) of the members that have no reward yet and no replacement."""
    statement = (
        select(RolloutTable.id, RolloutTable.workflow_id, TaskTable.label)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .where(_of(run_id, label), groups.wants_running())
        .order_by(RolloutTable.id)
    )
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement)]


async def evaluation_solve_rate(connection: AsyncConnection, run_id: str, label: str) -> tuple[int, int, float | None]:
    """(rollouts, of them with a reward, mean reward)."""
    statement = (
        select(func.count(), func.count(RolloutTable.reward), func.avg(RolloutTable.reward))
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(_of(run_id, label), RolloutTable.replaced_by.is_(None))
    )
    total, graded, mean = (await connection.execute(statement)).one()
    return total, graded, None if mean is None else float(mean)
