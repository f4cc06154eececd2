"""Verdicts: many per patch, one of which a rollout's reward comes from.

Why here: one file per aggregate.
Called by: `activities/grade.py`, `activities/diff.py`, `activities/rollout_records.py` and `activities/regrade.py`.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import Grade, Patch, Rollout


async def store(connection: AsyncConnection, values: dict[str, Any]) -> int:
    return int((await connection.execute(insert(Grade).values(**values).returning(Grade.id))).scalar_one())


async def get(connection: AsyncConnection, grade_id: int) -> Grade:
    return Grade(**(await connection.execute(select(Grade).where(Grade.id == grade_id))).one()._mapping)


async def first_of_patch(connection: AsyncConnection, patch_id: int) -> Grade | None:
    row = (
        await connection.execute(select(Grade).where(Grade.patch_id == patch_id).order_by(Grade.id).limit(1))
    ).one_or_none()
    return Grade(**row._mapping) if row else None


async def patches_to_regrade(
    connection: AsyncConnection, run_id: str | None, rollout_id: int | None
) -> Sequence[tuple[int, int, int]]:
    """(rollout id, attempt, patch id) of the last patch of a rollout, or of every rollout of a run that has one and has ended."""
    statement = (
        select(Rollout.id, Patch.attempt, Patch.id)
        .join(Patch, Patch.rollout_id == Rollout.id)
        .where(Rollout.outcome.is_not(None))
        .order_by(Rollout.id, Patch.attempt.desc())
        .distinct(Rollout.id)
    )
    statement = (
        statement.where(Rollout.run_id == run_id) if run_id is not None else statement.where(Rollout.id == rollout_id)
    )
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement)]
