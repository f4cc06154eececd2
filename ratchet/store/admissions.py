"""Admissions: which tasks may be trained and evaluated on, by grader version, with the evidence."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import AdmissionTable, TaskTable
from ratchet.types import JsonObject


class GraderVersion(NamedTuple):
    """A grader by name, and the version that judged."""

    grader: str
    version: str


@dataclass(slots=True, frozen=True)
class NewAdmission:
    """The result of examining one task. `gold_seconds`: median duration of the gold patch's tests, None without one."""

    task_id: int
    grader: str
    grader_version: str
    admitted: bool
    reason: str
    evidence: list[JsonObject]
    gold_seconds: float | None


async def store_admission(connection: AsyncConnection, admission: NewAdmission) -> None:
    """Store the result; it replaces an earlier one of the same task and grader version."""
    statement = insert(AdmissionTable).values(**asdict(admission))
    changed = {name: statement.excluded[name] for name in ("admitted", "reason", "evidence", "gold_seconds")}
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["task_id", "grader", "grader_version"], set_={**changed, "created_at": func.now()}
        )
    )


async def is_admitted(connection: AsyncConnection, task_id: int, grader: str, grader_version: str) -> bool:
    """Return whether this grader version has admitted the task; False if it has not examined it."""
    statement = select(AdmissionTable.admitted).where(
        AdmissionTable.task_id == task_id,
        AdmissionTable.grader == grader,
        AdmissionTable.grader_version == grader_version,
    )
    return bool((await connection.execute(statement)).scalar_one_or_none())


async def admissions_of_dataset(
    connection: AsyncConnection, dataset_digest: str, versions: Collection[GraderVersion]
) -> dict[int, AdmissionTable]:
    """Return the admissions by the given grader versions, by task id; unexamined tasks are missing."""
    statement = (
        select(AdmissionTable)
        .join(TaskTable, TaskTable.id == AdmissionTable.task_id)
        .where(TaskTable.dataset_digest == dataset_digest)
    )
    rows = [AdmissionTable(**row._mapping) for row in await connection.execute(statement)]
    return {row.task_id: row for row in rows if (row.grader, row.grader_version) in versions}
