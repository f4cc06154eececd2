"""The turns whose shell commands are counted: those of rollouts with a verdict, evenly spread over a run or a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import BatchItemTable, GradeTable, RolloutTable, TurnTable


@dataclass(slots=True, frozen=True)
class JudgedRollout:
    """A rollout with the verdict that decided its reward. `num_turns`: its model calls."""

    rollout_id: int
    solved: bool
    num_turns: int


@dataclass(slots=True, frozen=True)
class JudgedSample:
    """`rollouts`: every n-th of the `number` rollouts that match, oldest first."""

    number: int
    rollouts: list[JudgedRollout]


@dataclass(slots=True, frozen=True)
class PackedAnswer:
    """A model's answer as it is stored; `store.arrays.unpack_json` reads it."""

    rollout_id: int
    answer: bytes | None


async def sample_judged_rollouts(
    connection: AsyncConnection, run_id: str, step: int | None, purpose: str | None, size: int
) -> JudgedSample:
    """Return `size` rollouts of the run with a verdict, evenly spread over those that match, or all if they are fewer.

    `step`: only of groups that this step consumed. `purpose`: only of this purpose.
    """
    table = RolloutTable
    no = func.row_number().over(order_by=table.id) - 1
    judged = select(
        table.id, table.grade_id, table.num_turns, no.label("no"), func.count().over().label("number")
    ).where(table.run_id == run_id, table.grade_id.is_not(None), table.replaced_by.is_(None))
    if step is not None:
        of_step = (BatchItemTable.run_id == run_id) & (BatchItemTable.step == step)
        judged = judged.where(table.group_id.in_(select(BatchItemTable.group_id).where(of_step)))
    if purpose is not None:
        judged = judged.where(table.purpose == purpose)
    one = judged.subquery()
    statement = (
        select(one.c.id, GradeTable.solved, one.c.num_turns, one.c.number)
        .join(GradeTable, GradeTable.id == one.c.grade_id)
        .where(one.c.no * size % one.c.number < size)
        .order_by(one.c.id)
    )
    rows = (await connection.execute(statement)).all()
    return JudgedSample(rows[0].number if rows else 0, [JudgedRollout(*row[:3]) for row in rows])


def within_turns(rollouts: Sequence[JudgedRollout], max_turns: int) -> Sequence[JudgedRollout]:
    """Return the rollouts, or every second, fourth, … of them, so that they have at most `max_turns` turns together;
    at least one."""
    while len(rollouts) > 1 and sum(one.num_turns for one in rollouts) > max_turns:
        rollouts = rollouts[::2]
    return rollouts


async def read_packed_answers(connection: AsyncConnection, rollout_ids: Sequence[int]) -> list[PackedAnswer]:
    statement = (
        select(TurnTable.rollout_id, TurnTable.answer)
        .where(TurnTable.rollout_id.in_(rollout_ids), TurnTable.answer.is_not(None))
        .order_by(TurnTable.rollout_id, TurnTable.id)
    )
    return [PackedAnswer(*row) for row in await connection.execute(statement)]
