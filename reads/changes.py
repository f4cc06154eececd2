"""The mark of a page's state: a short text that differs as soon as the rows behind the page differ."""

from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import TurnState
from store.schema import GradeTable, RolloutTable, RunTable, SandboxTable, TurnTable


async def rollout_fingerprint(connection: AsyncConnection, rollout_id: int) -> str:
    """Return a text that changes with the rollout's outcome, attempt, turns, boxes and grades."""
    turns = select(
        func.count().filter(TurnTable.state != TurnState.IN_FLIGHT), func.coalesce(func.max(TurnTable.id), 0)
    ).where(TurnTable.rollout_id == rollout_id)
    boxes = select(func.count(), func.count(SandboxTable.live_at), func.count(SandboxTable.released_at)).where(
        SandboxTable.rollout_id == rollout_id
    )
    grades = select(func.count()).where(GradeTable.rollout_id == rollout_id)
    head = select(RolloutTable.outcome, RolloutTable.attempt, RolloutTable.grade_id, RolloutTable.claimed_at)
    return await _mark(connection, head.where(RolloutTable.id == rollout_id), turns, boxes, grades)


async def run_fingerprint(connection: AsyncConnection, run_id: str) -> str:
    """Return a text that changes with the run's state, its steps, and its started and ended rollouts."""
    head = select(
        RunTable.state, RunTable.state_reason, RunTable.step, RunTable.checkpoint_step, RunTable.next_group_no
    )
    newest = select(RolloutTable.id).where(RolloutTable.run_id == run_id).order_by(RolloutTable.id.desc()).limit(1)
    still_open = select(func.count(), func.count(RolloutTable.claimed_at)).where(
        RolloutTable.run_id == run_id, RolloutTable.outcome.is_(None)
    )
    return await _mark(connection, head.where(RunTable.run_id == run_id), newest, still_open)


async def runs_fingerprint(connection: AsyncConnection) -> str:
    """Return a text that changes if a run starts, ends, makes a step or changes its state."""
    statement = select(RunTable.run_id, RunTable.state, RunTable.step).order_by(RunTable.created_at.desc()).limit(50)
    return await _mark(connection, statement)


async def _mark(connection: AsyncConnection, *statements: Select[*tuple[Any, ...]]) -> str:
    return repr([tuple(row) for statement in statements for row in await connection.execute(statement)])
