"""One step for people: its plan row."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import BatchTable
from ratchet.types import JsonObject


@dataclass(slots=True, frozen=True)
class StepHead:
    """The plan row of a step without its members."""

    step: int
    state: str
    knobs: JsonObject
    denominators: list[JsonObject]
    epoch: int | None
    planned_at: datetime
    stepped_at: datetime | None
    committed_at: datetime | None


async def read_step_head(connection: AsyncConnection, run_id: str, step: int) -> StepHead | None:
    columns = [getattr(BatchTable, name) for name in StepHead.__slots__]
    statement = select(*columns).where(BatchTable.run_id == run_id, BatchTable.step == step)
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else StepHead(*row)
