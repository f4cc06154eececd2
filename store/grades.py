"""Stored verdicts: a patch may have many, and a rollout's reward comes from one of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Boolean, cast, exists, func, insert, not_, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.errors import FencedError
from ratchet.grading_payloads import StoredPatch
from ratchet.types import JsonObject
from store.columns import read_one
from store.schema import GradeTable, PatchTable, RolloutGroupTable, RolloutTable, SandboxTable


@dataclass(slots=True, frozen=True)
class GradeFields:
    """The fields of a verdict that is stored or shown; `GradeTable` describes the columns."""

    patch_id: int
    grader: str
    grader_version: str
    solved: bool
    rejected: bool
    rule: str
    reason: str
    tests: JsonObject
    fail_to_pass: Sequence[int] | None
    pass_to_pass: Sequence[int] | None
    rewards: JsonObject | None
    findings: list[JsonObject]
    repeat: int
    has_oracle: bool
    flags: list[JsonObject]
    duration_seconds: float


@dataclass(slots=True, frozen=True)
class NewGrade(GradeFields):
    """A verdict to be stored. `log`: zstd."""

    rollout_id: int
    log: bytes
    sandbox_id: int | None = None


@dataclass(slots=True, frozen=True)
class ControlVerdict:
    """Result of a control run. `result`: JSON with the run's number as `run`. `solved`: the grade stays solved, else
    `reason` says why not. `rejected`: tests passed that must fail; `rule`: the rule's name."""

    result: JsonObject
    solved: bool
    rejected: bool
    rule: str
    reason: str


async def store_grade(connection: AsyncConnection, grade: NewGrade) -> int:
    statement = insert(GradeTable).values(**asdict(grade)).returning(GradeTable.id)
    return int((await connection.execute(statement)).scalar_one())


async def record_control(connection: AsyncConnection, grade_id: int, verdict: ControlVerdict) -> None:
    """Add the result of a control run to its grade; a second result of the same run changes nothing."""
    control = func.coalesce(GradeTable.control, cast([], JSONB))
    values: JsonObject = {"control": control.op("||")(cast([verdict.result], JSONB))}
    if not verdict.solved:
        values |= {"solved": False, "rejected": verdict.rejected, "rule": verdict.rule, "reason": verdict.reason}
    is_new = not_(control.op("@>", return_type=Boolean())(cast([{"run": verdict.result["run"]}], JSONB)))
    await connection.execute(update(GradeTable).where(GradeTable.id == grade_id, is_new).values(**values))


async def get_grade(
    connection: AsyncConnection, grade_id: int, rollout_id: int, patch_id: int | None = None
) -> GradeTable:
    """Return a grade of the rollout, and of this patch of it unless None. Raises FencedError if there is none."""
    statement = select(GradeTable).where(GradeTable.id == grade_id, GradeTable.rollout_id == rollout_id)
    if patch_id is not None:
        statement = statement.where(GradeTable.patch_id == patch_id)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise FencedError(
            f"rollout {rollout_id} has no grade {grade_id}" + (f" of patch {patch_id}" if patch_id else "")
        )
    return GradeTable(**row._mapping)


async def grade_of_workflow(connection: AsyncConnection, patch_id: int, workflow_id: str) -> GradeTable | None:
    """Return the verdict on a patch that a box of this workflow has given; None without one."""
    statement = (
        select(GradeTable)
        .join(SandboxTable, SandboxTable.id == GradeTable.sandbox_id)
        .where(GradeTable.patch_id == patch_id, SandboxTable.workflow_id == workflow_id)
        .order_by(GradeTable.id)
        .limit(1)
    )
    return await read_one(connection, GradeTable, statement)


async def first_grade_of_patch(connection: AsyncConnection, patch_id: int) -> GradeTable | None:
    statement = select(GradeTable).where(GradeTable.patch_id == patch_id).order_by(GradeTable.id).limit(1)
    return await read_one(connection, GradeTable, statement)


async def patches_to_regrade(
    connection: AsyncConnection,
    run_id: str | None,
    rollout_id: int | None,
    after: int,
    count: int,
    group: str | None = None,
) -> list[StoredPatch]:
    """Return the last patches of `count` ended rollouts after the id `after`, of a run, a group or one rollout."""
    later = aliased(PatchTable)
    has_later = exists().where(later.rollout_id == PatchTable.rollout_id, later.attempt > PatchTable.attempt)
    statement = (
        select(RolloutTable.id, PatchTable.attempt, PatchTable.id)
        .join(PatchTable, PatchTable.rollout_id == RolloutTable.id)
        .where(RolloutTable.outcome.is_not(None), RolloutTable.id > after, ~has_later)
        .order_by(RolloutTable.id)
        .limit(count)
    )
    if run_id is not None:
        statement = statement.where(RolloutTable.run_id == run_id)
    elif group is not None:
        members = select(RolloutGroupTable.id).where(RolloutGroupTable.workflow_id == group)
        statement = statement.where(RolloutTable.group_id.in_(members))
    else:
        statement = statement.where(RolloutTable.id == rollout_id)
    return [StoredPatch(*row) for row in await connection.execute(statement)]
