"""The learner's records of each turn's trained tokens: entropies and log-ratios, by step."""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.token_statistics import TrainedTurn
from store.arrays import halves_from_bytes, halves_to_bytes
from store.schema import TrainedTurnTable


async def record_trained_turns(
    connection: AsyncConnection, run_id: str, step: int, turns: Sequence[TrainedTurn]
) -> None:
    """Store the turns in the place of those of an earlier try of the step, which may have had another plan row."""
    of_step = (TrainedTurnTable.run_id == run_id) & (TrainedTurnTable.step == step)
    await connection.execute(delete(TrainedTurnTable).where(of_step))
    if not turns:
        return
    rows = [
        {
            "run_id": run_id,
            "step": step,
            "turn_id": one.turn_id,
            "rollout_id": one.rollout_id,
            "start": one.start,
            "entropies": halves_to_bytes(one.entropies),
            "log_ratios": halves_to_bytes(one.log_ratios),
        }
        for one in turns
    ]
    await connection.execute(insert(TrainedTurnTable), rows)


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
