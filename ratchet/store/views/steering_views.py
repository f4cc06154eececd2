"""What people asked of a run, for people: each request as one sentence."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.steering import describe_change
from ratchet.store.schema import RolloutGroupTable, SteeringTable

_MAX_REQUESTS = 1000


@dataclass(slots=True, frozen=True)
class SteeringLine:
    """One request. `what`: the command, what it was about, and what it changed. `from_step`: the first step that was
    planned after it."""

    asked_at: datetime
    asked_by: str
    what: str
    reason: str
    from_step: int


async def list_requests(connection: AsyncConnection, run_id: str, group_id: int | None = None) -> list[SteeringLine]:
    """Return the requests to a run, newest first; `group_id`: only those about this group."""
    table = SteeringTable
    wanted = table.run_id == run_id
    if group_id is not None:
        named = select(RolloutGroupTable.workflow_id).where(RolloutGroupTable.id == group_id).scalar_subquery()
        wanted &= or_(table.target == named, table.before.op("@>")(func.jsonb_build_array(named)))
    columns = (table.asked_at, table.asked_by, table.action, table.target, table.before, table.after)
    statement = select(*columns, table.reason, table.from_step).where(wanted)
    rows = await connection.execute(statement.order_by(table.id.desc()).limit(_MAX_REQUESTS))
    return [
        SteeringLine(
            row.asked_at,
            row.asked_by,
            f"{row.action.replace('_', ' ')} {row.target.removeprefix('step/')}".strip()
            + describe_change(row.action, row.before, row.after),
            row.reason,
            row.from_step,
        )
        for row in rows
    ]
