"""Reports for people, as JSON objects for the CLI: runs, rollouts, one rollout in detail, the curve of a run.

Every report takes a fixed number of queries.
"""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject, Purpose
from reads.runs import shown_endpoint
from store import plans
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TaskTable,
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
    return [row | {"endpoint": shown_endpoint(row["endpoint"])} for row in rows]


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
