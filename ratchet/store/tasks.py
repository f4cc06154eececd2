"""Tasks: rows of datasets, imported once by digest.

Why here: one file per aggregate.
Called by: `activities/dataset_import.py`, `activities/run_lifecycle.py`, `ratchet tasks` and the stages that need a task's image, repository and grader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import distinct, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import Admission, Rollout, RolloutGroup, RunTask, Task
from ratchet.types import Purpose


@dataclass(slots=True, frozen=True)
class TaskRow:
    id: int
    label: str
    image: str
    workdir: str
    grader: str
    spec: dict[str, Any]


_COLUMNS = (Task.id, Task.label, Task.image, Task.workdir, Task.grader, Task.spec)


async def import_rows(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> int:
    """Idempotent by (dataset digest, row digest); returns how many were new."""
    if not rows:
        return 0
    statement = insert(Task).on_conflict_do_nothing().returning(Task.id)
    return len((await connection.execute(statement, list(rows))).all())


async def of_dataset(connection: AsyncConnection, dataset_digest: str) -> list[tuple[int, str, int]]:
    """(id, label, row number) of a dataset in file order."""
    statement = (
        select(Task.id, Task.label, Task.row_no).where(Task.dataset_digest == dataset_digest).order_by(Task.row_no)
    )
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement)]


async def of_rollout(connection: AsyncConnection, rollout_id: int) -> TaskRow:
    statement = select(*_COLUMNS).join(Rollout, Rollout.task_id == Task.id).where(Rollout.id == rollout_id)
    return TaskRow(*(await connection.execute(statement)).one())


async def get(connection: AsyncConnection, task_id: int) -> TaskRow:
    return TaskRow(*(await connection.execute(select(*_COLUMNS).where(Task.id == task_id))).one())


async def page(
    connection: AsyncConnection, dataset_digest: str, after: int, size: int, labels: Sequence[str], limit: int | None
) -> list[tuple[int, str, int]]:
    """(id, label, row number) of the next tasks behind row number `after`; `labels` empty means all, `limit` counts rows of the file."""
    statement = select(Task.id, Task.label, Task.row_no).where(
        Task.dataset_digest == dataset_digest, Task.row_no > after
    )
    if labels:
        statement = statement.where(Task.label.in_(list(labels)))
    if limit is not None:
        statement = statement.where(Task.row_no < limit)
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement.order_by(Task.row_no).limit(size))]


async def datasets(connection: AsyncConnection) -> list[dict[str, Any]]:
    """Every imported dataset: path, digest, rows, and how many of them are admitted or quarantined by any grader version."""
    statement = (
        select(
            Task.dataset,
            Task.dataset_digest,
            func.count(distinct(Task.id)).label("rows"),
            func.count(distinct(Task.id)).filter(Admission.admitted).label("admitted"),
            func.count(distinct(Task.id)).filter(Admission.admitted.is_(False)).label("quarantined"),
        )
        .outerjoin(Admission, Admission.task_id == Task.id)
        .group_by(Task.dataset, Task.dataset_digest)
        .order_by(func.max(Task.id).desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def listed(connection: AsyncConnection, dataset: str | None, limit: int) -> list[dict[str, Any]]:
    """Tasks with their newest admission, newest dataset first."""
    newest = select(Admission).distinct(Admission.task_id).order_by(Admission.task_id, Admission.id.desc()).subquery()
    statement = (
        select(
            Task.id,
            Task.label,
            Task.grader,
            Task.image,
            Task.dataset,
            newest.c.admitted,
            newest.c.reason,
            newest.c.gold_seconds,
        )
        .outerjoin(newest, newest.c.task_id == Task.id)
        .order_by(Task.id.desc() if dataset is None else Task.row_no)
        .limit(limit)
    )
    if dataset is not None:
        newest_digest = (
            select(Task.dataset_digest)
            .where(Task.dataset == dataset)
            .order_by(Task.id.desc())
            .limit(1)
            .scalar_subquery()
        )
        statement = statement.where(Task.dataset_digest == newest_digest)
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def admissions_of(connection: AsyncConnection, dataset: str) -> list[dict[str, Any]]:
    """Every admission of the newest import of a dataset, in file order; of a task by several grader versions the newest."""
    newest_digest = (
        select(Task.dataset_digest).where(Task.dataset == dataset).order_by(Task.id.desc()).limit(1).scalar_subquery()
    )
    columns = (
        Admission.grader,
        Admission.grader_version,
        Admission.admitted,
        Admission.reason,
        Admission.evidence,
        Admission.gold_seconds,
    )
    statement = (
        select(Task.row_no, Task.label, *columns)
        .join(Admission, Admission.task_id == Task.id)
        .where(Task.dataset_digest == newest_digest)
        .distinct(Task.row_no)
        .order_by(Task.row_no, Admission.id.desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def shown(connection: AsyncConnection, task: str) -> dict[str, Any] | None:
    """One task by id or label (the newest of that label), with every admission."""
    statement = (
        select(Task)
        .where(Task.id == int(task) if task.isdigit() else Task.label == task)
        .order_by(Task.id.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return None
    evidence = select(Admission).where(Admission.task_id == row.id).order_by(Admission.id)
    return {**row._mapping, "admissions": [dict(one._mapping) for one in await connection.execute(evidence)]}


async def recent_rates(
    connection: AsyncConnection, run_id: str, since_step: int
) -> list[tuple[int, str, int, int | None, float | None]]:
    """(id, label, position, number of the last group, mean reward of recent groups) of every training task of the run, in its order.

    Recent are groups that started at `since_step` or later; None: no group yet, no reward lately.
    """
    recent = RolloutGroup.started_step >= since_step
    counted = recent & Rollout.late.is_(False) & Rollout.replaced_by.is_(None)
    mine = (
        (RolloutGroup.run_id == RunTask.run_id)
        & (RolloutGroup.task_id == RunTask.task_id)
        & (RolloutGroup.purpose == Purpose.TRAIN)
    )
    statement = (
        select(Task.id, Task.label, RunTask.position, func.max(RolloutGroup.group_no), func.avg(Rollout.reward))
        .select_from(RunTask)
        .join(Task, Task.id == RunTask.task_id)
        .outerjoin(RolloutGroup, mine)
        .outerjoin(Rollout, (Rollout.group_id == RolloutGroup.id) & counted)
        .where(RunTask.run_id == run_id, RunTask.purpose == Purpose.TRAIN)
        .group_by(Task.id, Task.label, RunTask.position)
        .order_by(RunTask.position)
    )
    rows = await connection.execute(statement)
    return [(row[0], row[1], row[2], row[3], None if row[4] is None else float(row[4])) for row in rows]
