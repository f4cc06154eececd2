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

from ratchet.store.schema import AdmissionTable, RolloutGroupTable, RolloutTable, RunTaskTable, TaskTable
from ratchet.types import Purpose


@dataclass(slots=True, frozen=True)
class TaskRow:
    id: int
    label: str
    image: str
    workdir: str
    grader: str
    spec: dict[str, Any]


_COLUMNS = (TaskTable.id, TaskTable.label, TaskTable.image, TaskTable.workdir, TaskTable.grader, TaskTable.spec)


async def import_tasks(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> int:
    """Idempotent by (dataset digest, row digest); returns how many were new."""
    if not rows:
        return 0
    statement = insert(TaskTable).on_conflict_do_nothing().returning(TaskTable.id)
    return len((await connection.execute(statement, list(rows))).all())


async def tasks_of_dataset(connection: AsyncConnection, dataset_digest: str) -> list[tuple[int, str, int]]:
    """(id, label, row number) of a dataset in file order."""
    statement = (
        select(TaskTable.id, TaskTable.label, TaskTable.row_no)
        .where(TaskTable.dataset_digest == dataset_digest)
        .order_by(TaskTable.row_no)
    )
    return [(row[0], row[1], row[2]) for row in await connection.execute(statement)]


async def task_of_rollout(connection: AsyncConnection, rollout_id: int) -> TaskRow:
    statement = (
        select(*_COLUMNS).join(RolloutTable, RolloutTable.task_id == TaskTable.id).where(RolloutTable.id == rollout_id)
    )
    return TaskRow(*(await connection.execute(statement)).one())


async def get_task(connection: AsyncConnection, task_id: int) -> TaskRow:
    return TaskRow(*(await connection.execute(select(*_COLUMNS).where(TaskTable.id == task_id))).one())


async def page_of_tasks(
    connection: AsyncConnection, dataset_digest: str, after: int, size: int, labels: Sequence[str], limit: int | None
) -> list[tuple[int, str, int]]:
    """(id, label, row number) of the next tasks behind row number `after`; `labels` empty means all, `limit` counts rows of the file."""
    statement = select(TaskTable.id, TaskTable.label, TaskTable.row_no).where(
        TaskTable.dataset_digest == dataset_digest, TaskTable.row_no > after
    )
    if labels:
        statement = statement.where(TaskTable.label.in_(list(labels)))
    if limit is not None:
        statement = statement.where(TaskTable.row_no < limit)
    return [
        (row[0], row[1], row[2]) for row in await connection.execute(statement.order_by(TaskTable.row_no).limit(size))
    ]


async def list_datasets(connection: AsyncConnection) -> list[dict[str, Any]]:
    """Every imported dataset: path, digest, rows, and how many of them are admitted or quarantined by any grader version."""
    statement = (
        select(
            TaskTable.dataset,
            TaskTable.dataset_digest,
            func.count(distinct(TaskTable.id)).label("rows"),
            func.count(distinct(TaskTable.id)).filter(AdmissionTable.admitted).label("admitted"),
            func.count(distinct(TaskTable.id)).filter(AdmissionTable.admitted.is_(False)).label("quarantined"),
        )
        .outerjoin(AdmissionTable, AdmissionTable.task_id == TaskTable.id)
        .group_by(TaskTable.dataset, TaskTable.dataset_digest)
        .order_by(func.max(TaskTable.id).desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def list_tasks(connection: AsyncConnection, dataset: str | None, limit: int) -> list[dict[str, Any]]:
    """Tasks with their newest admission, newest dataset first."""
    newest = (
        select(AdmissionTable)
        .distinct(AdmissionTable.task_id)
        .order_by(AdmissionTable.task_id, AdmissionTable.id.desc())
        .subquery()
    )
    statement = (
        select(
            TaskTable.id,
            TaskTable.label,
            TaskTable.grader,
            TaskTable.image,
            TaskTable.dataset,
            newest.c.admitted,
            newest.c.reason,
            newest.c.gold_seconds,
        )
        .outerjoin(newest, newest.c.task_id == TaskTable.id)
        .order_by(TaskTable.id.desc() if dataset is None else TaskTable.row_no)
        .limit(limit)
    )
    if dataset is not None:
        newest_digest = (
            select(TaskTable.dataset_digest)
            .where(TaskTable.dataset == dataset)
            .order_by(TaskTable.id.desc())
            .limit(1)
            .scalar_subquery()
        )
        statement = statement.where(TaskTable.dataset_digest == newest_digest)
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def admissions_by_task(connection: AsyncConnection, dataset: str) -> list[dict[str, Any]]:
    """Every admission of the newest import of a dataset, in file order; of a task by several grader versions the newest."""
    newest_digest = (
        select(TaskTable.dataset_digest)
        .where(TaskTable.dataset == dataset)
        .order_by(TaskTable.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    columns = (
        AdmissionTable.grader,
        AdmissionTable.grader_version,
        AdmissionTable.admitted,
        AdmissionTable.reason,
        AdmissionTable.evidence,
        AdmissionTable.gold_seconds,
    )
    statement = (
        select(TaskTable.row_no, TaskTable.label, *columns)
        .join(AdmissionTable, AdmissionTable.task_id == TaskTable.id)
        .where(TaskTable.dataset_digest == newest_digest)
        .distinct(TaskTable.row_no)
        .order_by(TaskTable.row_no, AdmissionTable.id.desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def show_task(connection: AsyncConnection, task: str) -> dict[str, Any] | None:
    """One task by id or label (the newest of that label), with every admission."""
    statement = (
        select(TaskTable)
        .where(TaskTable.id == int(task) if task.isdigit() else TaskTable.label == task)
        .order_by(TaskTable.id.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return None
    evidence = select(AdmissionTable).where(AdmissionTable.task_id == row.id).order_by(AdmissionTable.id)
    return {**row._mapping, "admissions": [dict(one._mapping) for one in await connection.execute(evidence)]}


async def recent_solve_rates(
    connection: AsyncConnection, run_id: str, since_step: int
) -> list[tuple[int, str, int, int | None, float | None]]:
    """(id, label, position, number of the last group, mean reward of recent groups) of every training task of the run, in its order.

    Recent are groups that started at `since_step` or later; None: no group yet, no reward lately.
    """
    recent = RolloutGroupTable.started_step >= since_step
    counted = recent & RolloutTable.late.is_(False) & RolloutTable.replaced_by.is_(None)
    mine = (
        (RolloutGroupTable.run_id == RunTaskTable.run_id)
        & (RolloutGroupTable.task_id == RunTaskTable.task_id)
        & (RolloutGroupTable.purpose == Purpose.TRAIN)
    )
    statement = (
        select(
            TaskTable.id,
            TaskTable.label,
            RunTaskTable.position,
            func.max(RolloutGroupTable.group_no),
            func.avg(RolloutTable.reward),
        )
        .select_from(RunTaskTable)
        .join(TaskTable, TaskTable.id == RunTaskTable.task_id)
        .outerjoin(RolloutGroupTable, mine)
        .outerjoin(RolloutTable, (RolloutTable.group_id == RolloutGroupTable.id) & counted)
        .where(RunTaskTable.run_id == run_id, RunTaskTable.purpose == Purpose.TRAIN)
        .group_by(TaskTable.id, TaskTable.label, RunTaskTable.position)
        .order_by(RunTaskTable.position)
    )
    rows = await connection.execute(statement)
    return [(row[0], row[1], row[2], row[3], None if row[4] is None else float(row[4])) for row in rows]
