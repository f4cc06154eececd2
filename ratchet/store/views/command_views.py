"""The turns whose shell commands are counted: those of the newest rollouts of a run or of a step with a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import BatchItemTable, GradeTable, RolloutTable, TurnTable


@dataclass(slots=True, frozen=True)
class JudgedRollout:
    """A rollout with the verdict that decided its reward."""

    rollout_id: int
    solved: bool


@dataclass(slots=True, frozen=True)
class PackedAnswer:
    """A model's answer as it is stored; `ratchet.store.arrays.unpack_json` reads it."""

    rollout_id: int
    answer: bytes | None


async def list_judged_rollouts(
    connection: AsyncConnection, run_id: str, step: int | None, limit: int
) -> list[JudgedRollout]:
    """Return the newest rollouts of the run with a verdict; `step`: only of groups that this step consumed."""
    statement = (
        select(RolloutTable.id, GradeTable.solved)
        .join(GradeTable, GradeTable.id == RolloutTable.grade_id)
        .where(RolloutTable.run_id == run_id, RolloutTable.replaced_by.is_(None))
        .order_by(RolloutTable.id.desc())
        .limit(limit)
    )
    if step is not None:
        of_step = (BatchItemTable.run_id == run_id) & (BatchItemTable.step == step)
        statement = statement.where(RolloutTable.group_id.in_(select(BatchItemTable.group_id).where(of_step)))
    return [JudgedRollout(*row) for row in await connection.execute(statement)]


async def read_packed_answers(
    connection: AsyncConnection, rollout_ids: Sequence[int], limit: int
) -> list[PackedAnswer]:
    """Return the first `limit` answers, those of the newest rollouts first."""
    statement = (
        select(TurnTable.rollout_id, TurnTable.answer)
        .where(TurnTable.rollout_id.in_(rollout_ids), TurnTable.answer.is_not(None))
        .order_by(TurnTable.rollout_id.desc(), TurnTable.id)
        .limit(limit)
    )
    return [PackedAnswer(*row) for row in await connection.execute(statement)]
