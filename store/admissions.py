"""Admissions: which tasks may be trained and evaluated on, by grader version, with the evidence."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store.schema import AdmissionTable, BrokenOracleTable, TaskTable, TrialTable


class GraderVersion(NamedTuple):
    """A grader by name, and the version that judged."""

    grader: str
    version: str


@dataclass(slots=True, frozen=True)
class NewAdmission:
    """The result of examining one task. `gold_seconds`: median duration of the gold patch's tests, None without one.
    `oracle`: what the gold runs have in common, None without one."""

    task_id: int
    grader: str
    grader_version: str
    admitted: bool
    reason: str
    evidence: list[JsonObject]
    gold_seconds: float | None
    oracle: JsonObject | None = None


class TaskOracle(NamedTuple):
    """The results of admission about a task's true runs; both are JSON of `grading`. `broken`: number → content."""

    oracle: JsonObject | None
    broken: dict[int, JsonObject]


async def store_admission(connection: AsyncConnection, admission: NewAdmission) -> None:
    """Store the result in place of the grader version's earlier one, whose oracle stays if the new one is None."""
    statement = insert(AdmissionTable).values(**asdict(admission))
    changed = {name: statement.excluded[name] for name in ("admitted", "reason", "evidence", "gold_seconds")}
    if admission.oracle is not None:
        changed["oracle"] = statement.excluded.oracle
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["task_id", "grader", "grader_version"], set_={**changed, "created_at": func.now()}
        )
    )


async def is_admitted(connection: AsyncConnection, task_id: int, grader: str, grader_version: str) -> bool:
    """Return whether this grader version has admitted the task; False if it has not examined it."""
    examined = _of(AdmissionTable, task_id, GraderVersion(grader, grader_version))
    return bool(await connection.scalar(select(AdmissionTable.admitted).where(*examined)))


async def task_oracle(connection: AsyncConnection, task_id: int, version: GraderVersion) -> TaskOracle:
    """Return the task's oracle and its pool of broken ones; without an admission both are empty."""
    admitted = select(AdmissionTable.oracle).where(*_of(AdmissionTable, task_id, version), AdmissionTable.admitted)
    oracle = (await connection.execute(admitted)).scalar_one_or_none()
    if oracle is None:
        return TaskOracle(None, {})
    return TaskOracle(oracle, await pool_of_task(connection, task_id, version))


async def pool_of_task(connection: AsyncConnection, task_id: int, version: GraderVersion) -> dict[int, JsonObject]:
    """Return the task's broken oracles by number."""
    pool = select(BrokenOracleTable.number, BrokenOracleTable.content).where(*_of(BrokenOracleTable, task_id, version))
    return {row.number: row.content for row in await connection.execute(pool)}


async def store_trial(
    connection: AsyncConnection, task_id: int, version: GraderVersion, repeat: int, oracle: JsonObject
) -> None:
    """Keep what one gold run looked like until the admission is recorded."""
    await _put(connection, TrialTable, task_id, version, {"repeat": repeat}, {"oracle": oracle})


async def trials_of_task(connection: AsyncConnection, task_id: int, version: GraderVersion) -> list[JsonObject]:
    """Return the stored gold runs of an examination that is under way."""
    statement = select(TrialTable.oracle).where(*_of(TrialTable, task_id, version)).order_by(TrialTable.repeat)
    return list((await connection.execute(statement)).scalars())


async def delete_trials(connection: AsyncConnection, task_id: int, version: GraderVersion) -> None:
    """Delete the stored gold runs: the admission has been recorded, or a new one begins."""
    await connection.execute(delete(TrialTable).where(*_of(TrialTable, task_id, version)))


async def store_broken_oracle(
    connection: AsyncConnection, task_id: int, version: GraderVersion, number: int, content: JsonObject
) -> None:
    """Add a broken oracle to the task's pool, in place of one with the same number."""
    await _put(connection, BrokenOracleTable, task_id, version, {"number": number}, {"content": content})


async def delete_broken_oracles(connection: AsyncConnection, task_id: int, version: GraderVersion) -> None:
    """Empty the task's pool before a new admission fills it."""
    await connection.execute(delete(BrokenOracleTable).where(*_of(BrokenOracleTable, task_id, version)))


async def _put(
    connection: AsyncConnection,
    table: type[BrokenOracleTable | TrialTable],
    task_id: int,
    version: GraderVersion,
    number: dict[str, int],
    content: dict[str, JsonObject],
) -> None:
    """Insert a row of the task, in place of one with the same number."""
    key = {"task_id": task_id, "grader": version.grader, "grader_version": version.version, **number}
    statement = insert(table).values(**key, **content)
    await connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=content))


def _of(
    table: type[AdmissionTable | BrokenOracleTable | TrialTable], task_id: int, version: GraderVersion
) -> tuple[ColumnElement[bool], ...]:
    return table.task_id == task_id, table.grader == version.grader, table.grader_version == version.version


async def admissions_of_dataset(
    connection: AsyncConnection, dataset_digest: str, versions: Collection[GraderVersion], user: str
) -> dict[int, AdmissionTable]:
    """Return the admissions by the given grader versions, by task id; unexamined tasks are missing, and so are those
    whose tests ran as another user than `grading.user`, unless the row names it."""
    statement = (
        select(AdmissionTable)
        .join(TaskTable, TaskTable.id == AdmissionTable.task_id)
        .where(TaskTable.dataset_digest == dataset_digest)
    )
    rows = [AdmissionTable(**row._mapping) for row in await connection.execute(statement)]
    rows = [row for row in rows if all((trial.get("user") or user) == user for trial in row.evidence)]
    return {row.task_id: row for row in rows if (row.grader, row.grader_version) in versions}
