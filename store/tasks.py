"""Tasks: rows of datasets, imported once by digest, what their images are built from, and reports on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypedDict

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Select,
    Text,
    and_,
    any_,
    bindparam,
    cast,
    distinct,
    exists,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.errors import ConfigError
from ratchet.run_names import plain_name, rollout_number
from ratchet.types import JsonObject, OpenedUse, Purpose
from store.columns import columns_of
from store.schema import AdmissionTable, BuildContextTable, RolloutGroupTable, RolloutTable, RunTaskTable, TaskTable


@dataclass(slots=True, frozen=True)
class TaskRow:
    """A task as stages need it. `spec`: the row's metadata, with problem_statement and pre_commands filled in."""

    id: int
    label: str
    image: str
    workdir: str
    grader: str
    spec: JsonObject

    @property
    def opened(self) -> list[OpenedUse]:
        """The uses of boxes that have an open network; in stages, those of the run, too."""
        return self.spec.get("network") or []

    def with_network(self, opened: Sequence[OpenedUse]) -> Self:
        """Return the task with what the run opens the network for."""
        return replace(self, spec={**self.spec, "network": [*self.opened, *opened]})


class TaskFields(TypedDict):
    """The part of a task that its row digest covers."""

    label: str
    image: str
    workdir: str
    grader: str
    spec: JsonObject


class NewTask(TaskFields):
    """A row of the `task` table. `row_no`: position in the file, from 0."""

    dataset: str
    dataset_digest: str
    row_digest: str
    row_no: int


class NumberedTask(NamedTuple):
    """A task's id, label and position in its file, from 0."""

    task_id: int
    label: str
    row_no: int


_COLUMNS = columns_of(TaskRow, TaskTable)
_NEWEST_FIRST = (TaskTable.created_at.desc(), TaskTable.id.desc())


async def import_tasks(connection: AsyncConnection, rows: Sequence[NewTask]) -> int:
    """Insert rows that are not there yet, by (dataset digest, row digest); return how many were new.

    A known row that a later import has read in another way is the newest again.
    """
    if not rows:
        return 0
    statement = insert(TaskTable).on_conflict_do_nothing().returning(TaskTable.id)
    added = len((await connection.execute(statement, list(rows))).all())
    if added < len(rows):
        later = aliased(TaskTable)
        same_line = (later.dataset_digest == TaskTable.dataset_digest) & (later.row_no == TaskTable.row_no)
        is_later = tuple_(later.created_at, later.id) > tuple_(TaskTable.created_at, TaskTable.id)
        keys = [(row["dataset_digest"], row["row_digest"]) for row in rows]
        known = tuple_(TaskTable.dataset_digest, TaskTable.row_digest).in_(keys)
        outdated = update(TaskTable).where(known, exists().where(same_line, is_later))
        await connection.execute(outdated.values(created_at=func.clock_timestamp()))
    return added


async def tasks_of_dataset(connection: AsyncConnection, dataset_digest: str) -> list[NumberedTask]:
    """Return the tasks of a dataset in file order."""
    statement = (
        select(TaskTable.id, TaskTable.label, TaskTable.row_no)
        .where(_is_newest(TaskTable.dataset_digest == dataset_digest))
        .order_by(TaskTable.row_no)
    )
    return [NumberedTask(*row) for row in await connection.execute(statement)]


def _of_rollout(*columns: Any) -> Select[Any]:
    is_task = RolloutTable.task_id == TaskTable.id
    return select(*columns).join(RolloutTable, is_task).where(RolloutTable.id == bindparam("rollout_id"))


# Built once: building a statement takes longer than running it.
_TASK = _of_rollout(*_COLUMNS)
_OLD = aliased(TaskTable)
_WORK = ["problem_statement", "pre_commands", "repository_archive", "agent_user", "agent_environment", "network"]
_IS_MENDED = and_(
    TaskTable.dataset_digest == any_(bindparam("digests", type_=ARRAY(Text))),
    TaskTable.row_digest != _OLD.row_digest,
    *(getattr(TaskTable, name) == getattr(_OLD, name) for name in ("label", "image", "workdir")),
    *(TaskTable.spec[key].is_not_distinct_from(_OLD.spec[key]) for key in _WORK),
)
"""A row of imports with these digests gives an agent the same work as the old one, and differs otherwise."""
_OF_ROLLOUT = select(RolloutTable.task_id).where(RolloutTable.id == bindparam("rollout_id")).scalar_subquery()
_MENDED = select(*_COLUMNS).join(_OLD, _IS_MENDED).where(_OLD.id == _OF_ROLLOUT).order_by(TaskTable.id.desc()).limit(1)
_IMAGE, _LABEL = _of_rollout(TaskTable.image), _of_rollout(TaskTable.label)
_NETWORK = _of_rollout(TaskTable.spec["network"])


async def task_of_rollout(connection: AsyncConnection, rollout_id: int, mended_in: Sequence[str] = ()) -> TaskRow:
    """`mended_in`: digests of datasets; if one of them has other tests for the same work, that row."""
    of, found = {"rollout_id": rollout_id}, None
    if mended_in:
        found = (await connection.execute(_MENDED, {**of, "digests": list(mended_in)})).first()
    return TaskRow(*(found or (await connection.execute(_TASK, of)).one()))


async def count_mended(connection: AsyncConnection, task_ids: Sequence[int], mended_in: Sequence[str]) -> int:
    """Return how many of the tasks these datasets mend. Raises ConfigError if one is not examined as it was before."""
    was, is_now = (exists().where(AdmissionTable.task_id == one.id) for one in (_OLD, TaskTable))
    mended = select(_OLD.label, TaskTable.dataset, (~was | is_now).label("is_examined")).join(TaskTable, _IS_MENDED)
    mended = mended.where(_OLD.id.in_(task_ids)).distinct().order_by(TaskTable.dataset, _OLD.label)
    rows = (await connection.execute(mended, {"digests": list(mended_in)})).all()
    if new := [row for row in rows if not row.is_examined]:
        what = f"{new[0].dataset}: {len(new)} tasks have other tests that are not examined, such as {new[0].label!r}"
        raise ConfigError(f"{what}: `ratchet tasks admit {new[0].dataset}` first")
    return len(rows)


async def image_of_rollout(connection: AsyncConnection, rollout_id: int) -> str:
    """Return the image of the rollout's task, without its spec, which may be large."""
    return str((await connection.execute(_IMAGE, {"rollout_id": rollout_id})).scalar_one())


async def set_gold_patch(connection: AsyncConnection, task_id: int, patch: str) -> None:
    """Add the gold patch that a task's solution has made. A row that has one, other than null, keeps it."""
    statement = update(TaskTable).where(TaskTable.id == task_id, TaskTable.spec["gold_patch"].astext.is_(None))
    added = cast({"gold_patch": patch}, JSONB)
    await connection.execute(statement.values(spec=TaskTable.spec.op("||")(added)))


async def open_roles(connection: AsyncConnection, rollout_id: int) -> list[str]:
    """Return the roles of boxes for which the rollout's task asks for an open network."""
    return (await connection.execute(_NETWORK, {"rollout_id": rollout_id})).scalar_one() or []


async def first_image(connection: AsyncConnection, run_id: str) -> str | None:
    """Return the image of a task of the run; None if it has no task."""
    statement = (
        select(TaskTable.image)
        .join(RunTaskTable, RunTaskTable.task_id == TaskTable.id)
        .where(RunTaskTable.run_id == run_id)
        .order_by(RunTaskTable.purpose.desc(), RunTaskTable.position)
        .limit(1)
    )
    return (await connection.execute(statement)).scalar_one_or_none()


async def task_label_of_rollout(connection: AsyncConnection, rollout_id: int) -> str:
    """Return the label of the rollout's task, without its spec, which may be large."""
    return str((await connection.execute(_LABEL, {"rollout_id": rollout_id})).scalar_one())


async def get_task(connection: AsyncConnection, task_id: int) -> TaskRow:
    return TaskRow(*(await connection.execute(select(*_COLUMNS).where(TaskTable.id == task_id))).one())


async def page_of_tasks(
    connection: AsyncConnection, dataset_digest: str, after: int, size: int, labels: Sequence[str], limit: int | None
) -> list[NumberedTask]:
    """Return the next `size` tasks after row `after`. `labels` empty: all. `limit`: only the file's first rows."""
    statement = select(TaskTable.id, TaskTable.label, TaskTable.row_no).where(
        _is_newest(TaskTable.dataset_digest == dataset_digest), TaskTable.row_no > after
    )
    if labels:
        statement = statement.where(TaskTable.label.in_(list(labels)))
    if limit is not None:
        statement = statement.where(TaskTable.row_no < limit)
    rows = await connection.execute(statement.order_by(TaskTable.row_no).limit(size))
    return [NumberedTask(*row) for row in rows]


async def list_datasets(connection: AsyncConnection) -> list[JsonObject]:
    """Return every imported dataset: path, digest, rows, and how many any grader version admitted or quarantined."""
    statement = (
        select(
            TaskTable.dataset,
            TaskTable.dataset_digest,
            func.count(distinct(TaskTable.id)).label("rows"),
            func.count(distinct(TaskTable.id)).filter(AdmissionTable.admitted).label("admitted"),
            func.count(distinct(TaskTable.id)).filter(AdmissionTable.admitted.is_(False)).label("quarantined"),
        )
        .outerjoin(AdmissionTable, AdmissionTable.task_id == TaskTable.id)
        .where(_is_newest())
        .group_by(TaskTable.dataset, TaskTable.dataset_digest)
        .order_by(func.max(TaskTable.id).desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def list_tasks(connection: AsyncConnection, dataset: str, limit: int) -> list[JsonObject]:
    """Return the tasks of a dataset's newest import with their newest admission, in file order."""
    newest = (
        select(AdmissionTable)
        .ext(distinct_on(AdmissionTable.task_id))
        .order_by(AdmissionTable.task_id, AdmissionTable.id.desc())
        .subquery()
    )
    of_task = (TaskTable.id, TaskTable.label, TaskTable.grader, TaskTable.image)
    of_admission = ("grader_version", "admitted", "evidence", "reason", "gold_seconds")
    digests = select(TaskTable.dataset_digest).where(TaskTable.dataset == dataset).order_by(*_NEWEST_FIRST)
    statement = (
        select(*of_task, *(newest.c[name] for name in of_admission))
        .outerjoin(newest, newest.c.task_id == TaskTable.id)
        .where(_is_newest(TaskTable.dataset_digest == digests.limit(1).scalar_subquery()))
        .order_by(TaskTable.row_no)
        .limit(limit)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


def _is_newest(*of: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that no later import has read the task's line in another way. `of`: of which rows."""
    line = (TaskTable.dataset_digest, TaskTable.row_no)
    newest = select(TaskTable.id).ext(distinct_on(*line)).order_by(*line, *_NEWEST_FIRST)
    return TaskTable.id.in_(newest.where(*of))


async def show_task(connection: AsyncConnection, task: str) -> JsonObject | None:
    """Return one task by id, label (the newest with that label) or page, with all its admissions; None without one."""
    task = plain_name(task).removeprefix("/tasks/")
    number = rollout_number(task)
    statement = (
        select(TaskTable)
        .where(TaskTable.label == task if number is None else TaskTable.id == number)
        .order_by(*_NEWEST_FIRST)
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return None
    evidence = select(AdmissionTable).where(AdmissionTable.task_id == row.id).order_by(AdmissionTable.id)
    return {**row._mapping, "admissions": [dict(one._mapping) for one in await connection.execute(evidence)]}


class RecentSolveRate(NamedTuple):
    """A training task of a run. `last_group_no`: of its newest group, None without one. `mean_reward`: None without a
    recent reward. `position`: its place in the run's order. `dataset_no`: which of the config's datasets has it."""

    task_id: int
    label: str
    position: int
    last_group_no: int | None
    mean_reward: float | None
    dataset_no: int


async def recent_solve_rates(connection: AsyncConnection, run_id: str, since_step: int) -> list[RecentSolveRate]:
    """Return every training task of the run, in its order, with its mean reward since `since_step`, without forks."""
    recent = RolloutGroupTable.started_step >= since_step
    counted = recent & RolloutTable.late.is_(False) & RolloutTable.replaced_by.is_(None)
    mine = (
        (RolloutGroupTable.run_id == RunTaskTable.run_id)
        & (RolloutGroupTable.task_id == RunTaskTable.task_id)
        & (RolloutGroupTable.purpose == Purpose.TRAIN)
        & RolloutGroupTable.forked_turn_id.is_(None)
    )
    task = (TaskTable.id, TaskTable.label, RunTaskTable.position)
    newest, mean = func.max(RolloutGroupTable.group_no), func.avg(RolloutTable.reward)
    statement = (
        select(*task, newest, mean, RunTaskTable.dataset_no)
        .select_from(RunTaskTable)
        .join(TaskTable, TaskTable.id == RunTaskTable.task_id)
        .outerjoin(RolloutGroupTable, mine)
        .outerjoin(RolloutTable, (RolloutTable.group_id == RolloutGroupTable.id) & counted)
        .where(RunTaskTable.run_id == run_id, RunTaskTable.purpose == Purpose.TRAIN)
        .group_by(*task, RunTaskTable.dataset_no)
        .order_by(RunTaskTable.position)
    )
    return [RecentSolveRate(*row) for row in await connection.execute(statement)]


async def datasets_of_newest_groups(connection: AsyncConnection, run_id: str, count: int) -> dict[int, int]:
    """Return dataset number → how many of the run's newest `count` training groups are made from it."""
    newest = (
        select(RolloutGroupTable.task_id)
        .where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
        .order_by(RolloutGroupTable.group_no.desc())
        .limit(count)
        .subquery()
    )
    statement = (
        select(RunTaskTable.dataset_no, func.count())
        .join(newest, newest.c.task_id == RunTaskTable.task_id)
        .where(RunTaskTable.run_id == run_id, RunTaskTable.purpose == Purpose.TRAIN)
        .group_by(RunTaskTable.dataset_no)
    )
    return {number: found for number, found in await connection.execute(statement)}


async def add_build_contexts(connection: AsyncConnection, archives: Mapping[str, bytes]) -> None:
    """Store archives (tar.gz) by image; one that is known is kept, since the reference is its digest."""
    if archives:
        rows = [{"image": image, "archive": archive} for image, archive in sorted(archives.items())]
        await connection.execute(insert(BuildContextTable).on_conflict_do_nothing(), rows)


async def read_build_context(connection: AsyncConnection, image: str) -> bytes | None:
    """Return the archive (tar.gz) from which the image is built; None if no imported task has it."""
    return await connection.scalar(select(BuildContextTable.archive).where(BuildContextTable.image == image))
