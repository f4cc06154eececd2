"""Reports for people, as JSON objects for the CLI: runs, rollouts, one rollout in detail, the curve of a run.

Every report takes a fixed number of queries.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.run_names import rollout_number
from ratchet.types import JsonObject, Purpose
from store import plans
from store.arrays import unpack_text
from store.schema import (
    AttemptTable,
    BatchItemTable,
    BatchTable,
    ChainTable,
    EvaluationTable,
    GradeTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    SandboxTable,
    TaskTable,
    TurnTable,
)


async def list_runs(connection: AsyncConnection) -> list[JsonObject]:
    """Return every run with its progress and counts of rollouts, newest first."""
    counts = (
        select(
            RolloutTable.run_id,
            func.count().label("rollouts"),
            func.count(RolloutTable.outcome).label("ended"),
            func.count(RolloutTable.reward).label("graded"),
        )
        .group_by(RolloutTable.run_id)
        .subquery()
    )
    statement = (
        select(
            RunTable.run_id,
            RunTable.state,
            RunTable.state_reason,
            RunTable.wish,
            RunTable.stop_at,
            RunTable.config_name,
            RunTable.engine_set,
            RunTable.step,
            RunTable.checkpoint_step,
            RunTable.epoch,
            RunTable.best_step,
            RunTable.best_rate,
            RunTable.created_at,
            RunTable.ended_at,
            RunTable.config["endpoint"].label("endpoint"),
            RunTable.config["training"]["steps"].as_integer().label("steps"),
            func.coalesce(counts.c.rollouts, 0).label("rollouts"),
            func.coalesce(counts.c.ended, 0).label("ended"),
            func.coalesce(counts.c.graded, 0).label("graded"),
        )
        .outerjoin(counts, counts.c.run_id == RunTable.run_id)
        .order_by(RunTable.created_at.desc())
    )
    rows = [dict(row._mapping) for row in await connection.execute(statement)]
    return [row | {"endpoint": _named(row["endpoint"])} for row in rows]


def _named(endpoint: JsonObject | None) -> JsonObject | None:
    """Return what people are told of an endpoint, None if the policy answers."""
    return {"url": endpoint["url"], "model": endpoint["model"]} if endpoint else None


async def find_rollout(connection: AsyncConnection, name: str) -> int | None:
    """Return the id of the rollout with this id or workflow id, None without one."""
    number = rollout_number(name)
    column = RolloutTable.id == number if number is not None else RolloutTable.workflow_id == name
    return (await connection.execute(select(RolloutTable.id).where(column))).scalar_one_or_none()


_ATTEMPT_COLUMNS = (
    AttemptTable.n,
    AttemptTable.state,
    AttemptTable.agent_exit,
    AttemptTable.used_seconds,
    AttemptTable.transcript,
)
_TURN_COLUMNS = (
    TurnTable.id,
    TurnTable.attempt,
    TurnTable.lane,
    TurnTable.state,
    TurnTable.kind,
    TurnTable.parent_turn_id,
    TurnTable.fork_cause,
    TurnTable.prompt_tokens,
    TurnTable.num_sampled,
    TurnTable.finish_reason,
    TurnTable.version_spans,
    TurnTable.delivered,
    TurnTable.engine_wait_seconds,
    TurnTable.created_at,
    TurnTable.completed_at,
)
_PATCH_COLUMNS = (
    PatchTable.id,
    PatchTable.attempt,
    PatchTable.num_bytes,
    PatchTable.num_files,
    PatchTable.diff,
)
_GRADE_COLUMNS = (
    GradeTable.id,
    GradeTable.grader,
    GradeTable.grader_version,
    GradeTable.solved,
    GradeTable.rejected,
    GradeTable.rule,
    GradeTable.reason,
    GradeTable.findings,
    GradeTable.has_oracle,
    GradeTable.control,
    GradeTable.flags,
    GradeTable.log,
    GradeTable.duration_seconds,
)
_BOX_COLUMNS = (
    SandboxTable.id,
    SandboxTable.role,
    SandboxTable.attempt,
    SandboxTable.state,
    SandboxTable.provider_id,
    SandboxTable.release_reason,
)
_CHAIN_COLUMNS = (ChainTable.no, ChainTable.num_tokens, ChainTable.num_trained)


async def read_rollout(connection: AsyncConnection, rollout_id: int) -> JsonObject:
    """Return everything about one rollout except its token arrays."""

    async def rows(columns: Sequence[Any], rollout: Any, order: Any) -> list[JsonObject]:
        statement = select(*columns).where(rollout == rollout_id).order_by(order)
        return [dict(row._mapping) for row in await connection.execute(statement)]

    head = (
        select(*RolloutTable.__table__.c, TaskTable.label.label("task"), RunTable.config["endpoint"].label("endpoint"))
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .join(RunTable, RunTable.run_id == RolloutTable.run_id)
    )
    report: JsonObject = {
        "rollout": dict((await connection.execute(head.where(RolloutTable.id == rollout_id))).one()._mapping),
        "attempts": await rows(_ATTEMPT_COLUMNS, AttemptTable.rollout_id, AttemptTable.n),
        "turns": await rows(_TURN_COLUMNS, TurnTable.rollout_id, TurnTable.id),
        "patches": await rows(_PATCH_COLUMNS, PatchTable.rollout_id, PatchTable.id),
        "grades": await rows(_GRADE_COLUMNS, GradeTable.rollout_id, GradeTable.id),
        "boxes": await rows(_BOX_COLUMNS, SandboxTable.rollout_id, SandboxTable.id),
        "chains": await rows(_CHAIN_COLUMNS, ChainTable.rollout_id, ChainTable.no),
    }
    report["rollout"]["endpoint"] = _named(report["rollout"]["endpoint"])
    for name, column in (("attempts", "transcript"), ("patches", "diff"), ("grades", "log")):
        for row in report[name]:
            row[column] = unpack_text(row[column]) if row[column] is not None else None
    return report


async def read_steps(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return the run's curve, one row per planned step; `stepped_at`: when it was first trained."""
    statement = select(
        BatchTable.step,
        BatchTable.state,
        BatchTable.epoch,
        BatchTable.metrics,
        BatchTable.planned_at,
        plans.first_trained_at().label("stepped_at"),
    ).where(BatchTable.run_id == run_id)
    return [dict(row._mapping) for row in await connection.execute(statement.order_by(BatchTable.step))]


async def evaluation_rewards(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return one row per graded rollout of every evaluation: label, temperature, step, task and its dataset and family,
    reward.
    """
    statement = (
        select(
            RolloutGroupTable.label,
            EvaluationTable.temperature,
            EvaluationTable.step,
            TaskTable.row_digest.label("task"),
            TaskTable.dataset,
            TaskTable.spec["family"].astext.label("family"),
            RolloutTable.reward,
        )
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(
            EvaluationTable,
            (EvaluationTable.run_id == RolloutGroupTable.run_id) & (EvaluationTable.label == RolloutGroupTable.label),
        )
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .where(
            RolloutTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.EVAL,
            RolloutTable.reward.is_not(None),
            RolloutTable.replaced_by.is_(None),
        )
        .order_by(RolloutGroupTable.label, TaskTable.row_no, RolloutTable.member)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def run_progress(connection: AsyncConnection, run_id: str) -> JsonObject:
    """Return the counts that `ratchet train` shows while it waits."""
    run = (
        await connection.execute(
            select(RunTable.state, RunTable.state_reason, RunTable.step).where(RunTable.run_id == run_id)
        )
    ).one()
    counts = (
        await connection.execute(
            select(
                func.count(),
                func.count(RolloutTable.outcome),
                func.count(RolloutTable.reward),
                func.count().filter(RolloutTable.outcome.in_(["infra_failed", "grader_failed"])),
            ).where(RolloutTable.run_id == run_id)
        )
    ).one()
    ended = (
        select(EvaluationTable.label)
        .where(EvaluationTable.run_id == run_id, EvaluationTable.ended_at.is_not(None))
        .order_by(EvaluationTable.label)
    )
    without_signal = (
        select(func.count())
        .select_from(BatchItemTable)
        .where(BatchItemTable.run_id == run_id, BatchItemTable.use != "trained")
    )
    return {
        "state": run.state,
        "reason": run.state_reason,
        "step": run.step,
        "rollouts": counts[0],
        "ended": counts[1],
        "graded": counts[2],
        "failed": counts[3],
        "evaluations": list((await connection.execute(ended)).scalars()),
        "groups_without_signal": (await connection.execute(without_signal)).scalar_one(),
    }
