"""The trained tokens of a step whose ratios are furthest from 1, as the learner saw them."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import StepTokenTable


async def record_step_tokens(
    connection: AsyncConnection, run_id: str, step: int, tokens: Sequence[Mapping[str, Any]]
) -> None:
    """Store the tokens, the furthest first, in the place of those of an earlier try of the step."""
    of_step = (StepTokenTable.run_id == run_id) & (StepTokenTable.step == step)
    await connection.execute(delete(StepTokenTable).where(of_step))
    if tokens:
        rows = [{"run_id": run_id, "step": step, "no": no, **token} for no, token in enumerate(tokens)]
        await connection.execute(insert(StepTokenTable), rows)
