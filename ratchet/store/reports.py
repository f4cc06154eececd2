"""Read-only views for people: runs, rollouts, one rollout's story, the curve of a run.

Why here: the CLI and the viewer ask the same questions; every one is answered from Postgres with a fixed number of queries.
Called by: `ratchet runs | rollouts | show | train` and the tests.
"""

from typing import Any

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.arrays import unpack_text
from ratchet.store.schema import (
    Attempt,
    Batch,
    BatchItem,
    Chain,
    Evaluation,
    Grade,
    Patch,
    Rollout,
    RolloutGroup,
    Run,
    Sandbox,
    Task,
    Turn,
)
from ratchet.types import Purpose


async def list_runs(connection: AsyncConnection) -> list[dict[str, Any]]:
    counts = (
        select(
            Rollout.run_id,
            func.count().label("rollouts"),
            func.count(Rollout.outcome).label("ended"),
            func.count(Rollout.reward).label("graded"),
        )
        .group_by(Rollout.run_id)
        .subquery()
    )
    statement = (
        select(
            Run.run_id,
            Run.state,
            Run.state_reason,
            Run.config_name,
            Run.step,
            Run.checkpoint_step,
            Run.epoch,
            Run.created_at,
            Run.ended_at,
            cast(Run.config["training"]["steps"].astext, Integer).label("steps"),
            func.coalesce(counts.c.rollouts, 0).label("rollouts"),
            func.coalesce(counts.c.ended, 0).label("ended"),
            func.coalesce(counts.c.graded, 0).label("graded"),
        )
        .outerjoin(counts, counts.c.run_id == Run.run_id)
        .order_by(Run.created_at.desc())
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def list_rollouts(connection: AsyncConnection, run_id: str, limit: int) -> list[dict[str, Any]]:
    """Newest first."""
    statement = (
        select(
            Rollout.id,
            Rollout.workflow_id,
            Rollout.purpose,
            Task.label.label("task"),
            Rollout.outcome,
            Rollout.outcome_reason,
            Rollout.reward,
            Rollout.agent_exit,
            Rollout.num_turns,
            Rollout.num_trained_tokens,
            Rollout.attempt,
            Rollout.late,
            Rollout.created_at,
            Rollout.ended_at,
        )
        .join(Task, Task.id == Rollout.task_id)
        .where(Rollout.run_id == run_id)
        .order_by(Rollout.id.desc())
        .limit(limit)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def find_rollout(connection: AsyncConnection, name: str) -> int | None:
    """By id or workflow id."""
    column = Rollout.id == int(name) if name.isdigit() else Rollout.workflow_id == name
    return (await connection.execute(select(Rollout.id).where(column))).scalar_one_or_none()


async def rollout(connection: AsyncConnection, rollout_id: int) -> dict[str, Any]:
    """Everything about one rollout but its token arrays."""

    async def rows(statement: Any) -> list[dict[str, Any]]:
        return [dict(row._mapping) for row in await connection.execute(statement)]

    head = (
        await rows(select(*Rollout.__table__.c, Task.label.label("task")).join(Task).where(Rollout.id == rollout_id))
    )[0]
    turns = select(
        Turn.id,
        Turn.attempt,
        Turn.lane,
        Turn.state,
        Turn.kind,
        Turn.parent_turn_id,
        Turn.fork_cause,
        Turn.prompt_tokens,
        Turn.num_sampled,
        Turn.finish_reason,
        Turn.version_spans,
        Turn.delivered,
        Turn.engine_wait_seconds,
        Turn.created_at,
        Turn.completed_at,
    )
    attempts = select(Attempt.n, Attempt.state, Attempt.agent_exit, Attempt.used_seconds, Attempt.transcript)
    patches = select(Patch.id, Patch.attempt, Patch.num_bytes, Patch.num_files, Patch.diff)
    grades = select(
        Grade.id,
        Grade.grader,
        Grade.grader_version,
        Grade.solved,
        Grade.rejected,
        Grade.rule,
        Grade.reason,
        Grade.findings,
        Grade.log,
        Grade.duration_seconds,
    )
    boxes = select(
        Sandbox.id, Sandbox.role, Sandbox.attempt, Sandbox.state, Sandbox.provider_id, Sandbox.release_reason
    )
    story: dict[str, Any] = {
        "rollout": head,
        "attempts": await rows(attempts.where(Attempt.rollout_id == rollout_id).order_by(Attempt.n)),
        "turns": await rows(turns.where(Turn.rollout_id == rollout_id).order_by(Turn.id)),
        "patches": await rows(patches.where(Patch.rollout_id == rollout_id).order_by(Patch.id)),
        "grades": await rows(grades.where(Grade.rollout_id == rollout_id).order_by(Grade.id)),
        "boxes": await rows(boxes.where(Sandbox.rollout_id == rollout_id).order_by(Sandbox.id)),
        "chains": await rows(
            select(Chain.no, Chain.num_tokens, Chain.num_trained)
            .where(Chain.rollout_id == rollout_id)
            .order_by(Chain.no)
        ),
    }
    for name, column in (("attempts", "transcript"), ("patches", "diff"), ("grades", "log")):
        for row in story[name]:
            row[column] = unpack_text(row[column]) if row[column] is not None else None
    return story


async def steps(connection: AsyncConnection, run_id: str) -> list[dict[str, Any]]:
    """The curve: one row per planned step."""
    statement = select(Batch.step, Batch.state, Batch.epoch, Batch.metrics, Batch.planned_at, Batch.stepped_at).where(
        Batch.run_id == run_id
    )
    return [dict(row._mapping) for row in await connection.execute(statement.order_by(Batch.step))]


async def evaluation_rewards(connection: AsyncConnection, run_id: str) -> list[dict[str, Any]]:
    """One row per graded rollout of every evaluation: label, task, family, reward."""
    statement = (
        select(
            RolloutGroup.label,
            Evaluation.temperature,
            Evaluation.step,
            Task.row_digest.label("task"),
            Task.spec["family"].astext.label("family"),
            Rollout.reward,
        )
        .join(RolloutGroup, RolloutGroup.id == Rollout.group_id)
        .join(Evaluation, (Evaluation.run_id == RolloutGroup.run_id) & (Evaluation.label == RolloutGroup.label))
        .join(Task, Task.id == Rollout.task_id)
        .where(
            Rollout.run_id == run_id,
            RolloutGroup.purpose == Purpose.EVAL,
            Rollout.reward.is_not(None),
            Rollout.replaced_by.is_(None),
        )
        .order_by(RolloutGroup.label, Task.row_no, Rollout.member)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def progress(connection: AsyncConnection, run_id: str) -> dict[str, Any]:
    """What `ratchet train` shows while it waits."""
    run = (await connection.execute(select(Run.state, Run.state_reason, Run.step).where(Run.run_id == run_id))).one()
    counts = (
        await connection.execute(
            select(
                func.count(),
                func.count(Rollout.outcome),
                func.count(Rollout.reward),
                func.count().filter(Rollout.outcome.in_(["infra_failed", "grader_failed"])),
            ).where(Rollout.run_id == run_id)
        )
    ).one()
    ended = (
        select(Evaluation.label)
        .where(Evaluation.run_id == run_id, Evaluation.ended_at.is_not(None))
        .order_by(Evaluation.label)
    )
    dull = select(func.count()).select_from(BatchItem).where(BatchItem.run_id == run_id, BatchItem.use != "trained")
    return {
        "state": run.state,
        "reason": run.state_reason,
        "step": run.step,
        "rollouts": counts[0],
        "ended": counts[1],
        "graded": counts[2],
        "failed": counts[3],
        "evaluations": list((await connection.execute(ended)).scalars()),
        "groups_without_signal": (await connection.execute(dull)).scalar_one(),
    }
