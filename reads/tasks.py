"""One task for people: its row, its rollouts by run and version, its admissions, and verdicts that contradict."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store.columns import columns_of, read_one
from store.schema import AdmissionTable, GradeTable, RolloutGroupTable, RolloutTable, RunTable, RunTaskTable, TaskTable


@dataclass(slots=True, frozen=True)
class TaskHead:
    id: int
    label: str
    dataset: str
    row_no: int
    image: str
    workdir: str
    grader: str
    problem: str
    created_at: datetime


@dataclass(slots=True, frozen=True)
class AdmissionView:
    """An admission; `AdmissionTable` describes the columns."""

    grader: str
    grader_version: str
    admitted: bool
    reason: str
    evidence: list[JsonObject]
    has_oracle: bool
    gold_seconds: float | None
    created_at: datetime


@dataclass(slots=True, frozen=True)
class TaskPolicyRate:
    """Rollouts of a task within one run that were started under one policy step."""

    run_id: str
    purpose: str
    policy_step: int
    num_rollouts: int
    num_graded: int
    mean: float | None


@dataclass(slots=True, frozen=True)
class ContradictingPatch:
    """One patch that a grader version judged as solved at one time and as not solved at another."""

    rollout_id: int
    patch_id: int
    grader: str
    grader_version: str
    num_solved: int
    num_unsolved: int


@dataclass(slots=True, frozen=True)
class FoundTask:
    id: int
    label: str


async def find_tasks(connection: AsyncConnection, run_id: str | None, words: str, limit: int) -> list[FoundTask]:
    """Return tasks of the run, or of all runs, whose labels contain the words, the shortest labels first.

    Those of rollouts by hand are not in the run's plan, so they are read from its rollouts; such runs are small.
    """
    planned = select(RunTaskTable.task_id).where(RunTaskTable.run_id == run_id)
    by_hand = select(RolloutTable.task_id).where(RolloutTable.run_id == run_id, RolloutTable.group_id.is_(None))
    statement = (
        select(TaskTable.id, TaskTable.label)
        .where(TaskTable.label.icontains(words, autoescape=True))
        .order_by(func.length(TaskTable.label), TaskTable.label, TaskTable.id)
        .limit(limit)
    )
    if run_id is not None:
        statement = statement.where(TaskTable.id.in_(planned.union(by_hand)))
    return [FoundTask(*row) for row in await connection.execute(statement)]


async def read_task_head(connection: AsyncConnection, task_id: int) -> TaskHead | None:
    problem = func.coalesce(TaskTable.spec["problem_statement"].astext, TaskTable.spec["prompt"].astext, "")
    columns = columns_of(TaskHead, TaskTable, problem=problem)
    return await read_one(connection, TaskHead, select(*columns).where(TaskTable.id == task_id))


async def list_admissions(connection: AsyncConnection, task_id: int) -> list[AdmissionView]:
    columns = columns_of(AdmissionView, AdmissionTable, has_oracle=AdmissionTable.oracle.is_not(None))
    statement = select(*columns).where(AdmissionTable.task_id == task_id).order_by(AdmissionTable.id.desc())
    return [AdmissionView(*row) for row in await connection.execute(statement)]


async def task_rates(connection: AsyncConnection, task_id: int) -> list[TaskPolicyRate]:
    """Return the task's rollouts by run and policy step, in order of time."""
    keys = (RolloutTable.run_id, RolloutTable.purpose, RolloutGroupTable.started_step)
    statement = (
        select(*keys, func.count(), func.count(RolloutTable.reward), func.avg(RolloutTable.reward))
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(RolloutTable.task_id == task_id, RolloutTable.replaced_by.is_(None))
        .group_by(*keys)
        .order_by(func.min(RolloutTable.id))
    )
    return [TaskPolicyRate(*row) for row in await connection.execute(statement)]


async def contradicting_patches(connection: AsyncConnection, task_id: int, limit: int) -> list[ContradictingPatch]:
    """Return patches of the task on which repeated grades of one grader version disagree."""
    solved = func.count().filter(GradeTable.solved)
    unsolved = func.count().filter(~GradeTable.solved)
    keys = (GradeTable.rollout_id, GradeTable.patch_id, GradeTable.grader, GradeTable.grader_version)
    statement = (
        select(*keys, solved, unsolved)
        .join(RolloutTable, RolloutTable.id == GradeTable.rollout_id)
        .where(RolloutTable.task_id == task_id)
        .group_by(*keys)
        .having(solved > 0, unsolved > 0)
        .limit(limit)
    )
    return [ContradictingPatch(*row) for row in await connection.execute(statement)]


async def renderer_of(connection: AsyncConnection, run_id: str, task_id: int) -> str:
    """Return the `renderer` of the task's dataset in the run's config; the name of the task's grader without one."""
    planned = (RunTaskTable.run_id == run_id) & (RunTaskTable.task_id == task_id)
    statement = (
        select(TaskTable.grader, RunTable.config["datasets"].label("datasets"), RunTaskTable.dataset_no)
        .select_from(TaskTable)
        .join(RunTable, RunTable.run_id == run_id)
        .outerjoin(RunTaskTable, planned)
    )
    row = (await connection.execute(statement.where(TaskTable.id == task_id).limit(1))).one()
    named = None if row.dataset_no is None else row.datasets[row.dataset_no].get("renderer")
    return str(named or row.grader)


async def read_task_spec(connection: AsyncConnection, task_id: int) -> JsonObject:
    """Return the row's metadata, with its problem statement."""
    spec: JsonObject = (await connection.execute(select(TaskTable.spec).where(TaskTable.id == task_id))).scalar_one()
    return spec
