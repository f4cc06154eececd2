"""The requests that people made of a run, for people: each as one sentence."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.steering import STEP_TARGET, describe_request
from ratchet.types import SteeringAction
from store.schema import RolloutGroupTable, RolloutTable, SteeringTable

_MAX_REQUESTS = 1000


@dataclass(slots=True, frozen=True)
class SteeringLine:
    """One request; `SteeringTable` describes the columns. `what`: the request as one sentence. `link`: the page of the
    group, rollout or step that it was about, empty for the run. `from_step`: the first step planned after it."""

    id: int
    action: str
    target: str
    before: Any
    after: Any
    asked_at: datetime
    asked_by: str
    what: str
    link: str
    reason: str
    from_step: int


def _first_step_after() -> ColumnElement[int]:
    """Return the first step that was planned after a request.

    A row's `from_step` is the first step that had no plan row at that time. If `ratchet resume --skip-step` later
    discards the plan of an earlier step, that step is planned anew, and so after the request, too.
    """
    later = aliased(SteeringTable)
    discarded = (
        select(func.min(later.from_step))
        .where(
            later.run_id == SteeringTable.run_id, later.action == SteeringAction.SKIP_STEP, later.id > SteeringTable.id
        )
        .correlate(SteeringTable)
        .scalar_subquery()
    )
    return func.least(SteeringTable.from_step, discarded)


async def list_requests(
    connection: AsyncConnection, run_id: str, group_id: int | None = None, limit: int = _MAX_REQUESTS
) -> list[SteeringLine]:
    """Return the requests to a run, newest first; `group_id`: only those about this group."""
    table = SteeringTable
    wanted = table.run_id == run_id
    if group_id is not None:
        named = select(RolloutGroupTable.workflow_id).where(RolloutGroupTable.id == group_id).scalar_subquery()
        wanted &= or_(table.target == named, table.before.op("@>")(func.jsonb_build_array(named)))
    group = select(RolloutGroupTable.id).where(RolloutGroupTable.workflow_id == table.target).limit(1)
    rollout = select(RolloutTable.id).where(RolloutTable.workflow_id == table.target).limit(1)
    statement = select(
        *(table.id, table.asked_at, table.asked_by, table.action, table.target, table.before, table.after),
        *(table.reason, _first_step_after().label("from_step")),
        group.scalar_subquery().label("group_id"),
        rollout.scalar_subquery().label("rollout_id"),
    )
    rows = await connection.execute(statement.where(wanted).order_by(table.id.desc()).limit(limit))
    return [
        SteeringLine(
            **{name: value for name, value in row._mapping.items() if name not in ("group_id", "rollout_id")},
            what=describe_request(row.action, row.target, row.before, row.after),
            link=_link(run_id, row.target, row.group_id, row.rollout_id),
        )
        for row in rows
    ]


def _link(run_id: str, target: str, group_id: int | None, rollout_id: int | None) -> str:
    if target.startswith(STEP_TARGET):
        return f"/runs/{quote(run_id)}/steps/{target.removeprefix(STEP_TARGET)}"
    if group_id is not None:
        return f"/groups/{group_id}"
    return "" if rollout_id is None else f"/rollouts/{rollout_id}"
