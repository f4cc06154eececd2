"""Verdicts: many per patch, one of which a rollout's reward comes from.

Why here: one file per aggregate.
Called by: `activities/grade.py`, `activities/diff.py`, `activities/rollout_records.py` and `activities/regrade.py`.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import GradeTable, PatchTable, RolloutTable


async def store_grade(connection: AsyncConnection, values: dict[str, Any]) -> int:
    return int((await connection.execute(insert(GradeTable).values(**values).returning(GradeTable.id))).scalar_one())


async def get_grade(connection: AsyncConnection, grade_id: int) -> GradeTable:
    return GradeTable(**(await connection.execute(select(GradeTable).where(GradeTable.id == grade_id))).one()._mapping)


async def first_grade_of_patch(connection: AsyncConnection, patch_id: int) -> GradeTable | None:
    row = (
        await connection.execute(
            select(GradeTable).where(GradeTable.patch_id == patch_id).order_by(GradeTable.id).limit(1)
        )
    ).one_or_none()
    return GradeTable(**row._mapping) if row else None


async def patches_to_regrade(
    connection: AsyncConnection, run_id: str | None, rollout_id: int | None
) -> Sequence[tuple[int, int, int]]:
    """(rollout id, attempt, patch id) of the last patch of a rollout, or of every rollout of a run that has one and has ended."""
    statement = (
        select(RolloutTable.id, PatchTable.attempt, PatchTable.id)
        .join(PatchTable, PatchTable.rollout_id == RolloutTable.id)
        .where(RolloutTable.outcome.is_not(None))
        .order_by(RolloutTable.id, PatchTable.attempt.desc())
        .distinct(RolloutTable.id)
    )
    statement = (
        statement.where(RolloutTable.run_id == run_id)
        if run_id is not None
        else statement.where(RolloutTable.id == rollout_id)
    )
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement)]
