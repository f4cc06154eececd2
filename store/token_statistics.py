"""The learner's records of a step's trained tokens: entropies and log-ratios by turn, and the largest ratios."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.token_statistics import TrainedTurn
from ratchet.types import JsonObject
from store.arrays import halves_from_bytes, halves_to_bytes
from store.schema import StepTokenTable, TrainedTurnTable


async def record_trained_turns(
    connection: AsyncConnection, run_id: str, step: int, turns: Sequence[TrainedTurn]
) -> None:
    """Store the turns in the place of those of an earlier try of the step, which may have had another plan row."""
    rows: list[JsonObject] = [
        {
            "turn_id": one.turn_id,
            "rollout_id": one.rollout_id,
            "start": one.start,
            "entropies": halves_to_bytes(one.entropies),
            "log_ratios": halves_to_bytes(one.log_ratios),
        }
        for one in turns
    ]
    await _replace_rows(connection, TrainedTurnTable, run_id, step, rows)


async def record_step_tokens(
    connection: AsyncConnection, run_id: str, step: int, tokens: Sequence[Mapping[str, Any]]
) -> None:
    """Store the tokens whose ratios are furthest from 1, the furthest first, as `record_trained_turns` does."""
    rows = [{"no": no, **token} for no, token in enumerate(tokens)]
    await _replace_rows(connection, StepTokenTable, run_id, step, rows)


async def _replace_rows(
    connection: AsyncConnection,
    table: type[TrainedTurnTable | StepTokenTable],
    run_id: str,
    step: int,
    rows: Sequence[JsonObject],
) -> None:
    await connection.execute(delete(table).where(table.run_id == run_id, table.step == step))
    if rows:
        await connection.execute(insert(table), [{"run_id": run_id, "step": step, **row} for row in rows])


async def read_trained_turns(
    connection: AsyncConnection, run_id: str, step: int, turn_ids: Collection[int]
) -> dict[int, TrainedTurn]:
    """Return what the step's learner saw of these turns, by turn. Turns that it did not train are missing."""
    table = TrainedTurnTable
    columns = (table.turn_id, table.rollout_id, table.start, table.entropies, table.log_ratios)
    wanted = (table.run_id == run_id) & (table.step == step) & table.turn_id.in_(turn_ids)
    return {
        turn: TrainedTurn(turn, rollout, start, halves_from_bytes(entropies), halves_from_bytes(log_ratios))
        for turn, rollout, start, entropies, log_ratios in await connection.execute(select(*columns).where(wanted))
    }
