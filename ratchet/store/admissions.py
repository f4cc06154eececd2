"""Admissions: which tasks may be trained and evaluated on, by grader version, with the evidence.

Why here: one file per aggregate.
Called by: `activities/admission.py`, `activities/diff.py` (an empty patch on an admitted task needs no box) and `activities/run_lifecycle.py`.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import AdmissionTable, TaskTable


async def store_admission(connection: AsyncConnection, values: dict[str, Any]) -> None:
    """The newest admission of a task by a grader version replaces the one before."""
    statement = insert(AdmissionTable).values(**values)
    changed = {name: statement.excluded[name] for name in ("admitted", "reason", "evidence", "gold_seconds")}
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["task_id", "grader", "grader_version"], set_={**changed, "created_at": func.now()}
        )
    )


async def is_admitted(connection: AsyncConnection, task_id: int, grader: str, grader_version: str) -> bool:
    statement = select(AdmissionTable.admitted).where(
        AdmissionTable.task_id == task_id,
        AdmissionTable.grader == grader,
        AdmissionTable.grader_version == grader_version,
    )
    return bool((await connection.execute(statement)).scalar_one_or_none())


async def admissions_of_dataset(
    connection: AsyncConnection, dataset_digest: str, versions: Sequence[tuple[str, str]]
) -> dict[int, AdmissionTable]:
    """Task id → its admission by the present version of its grader; tasks that were never examined are not in it."""
    statement = (
        select(AdmissionTable)
        .join(TaskTable, TaskTable.id == AdmissionTable.task_id)
        .where(TaskTable.dataset_digest == dataset_digest)
    )
    current = set(versions)
    rows = [AdmissionTable(**row._mapping) for row in await connection.execute(statement)]
    return {row.task_id: row for row in rows if (row.grader, row.grader_version) in current}
