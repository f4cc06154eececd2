"""Outages of the stack's parts, suspensions of agents, and how long a rollout has had boxes outside of them.

The watcher writes the outages. Several parts that are away at once count once, and so do several boxes. One of a
gateway behind a front (`Stack.box_gateways`) is that of its boxes only, whose ids begin with the last word of its part.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, literal_column, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import ColumnElement

from ratchet.types import SessionState
from store import sessions
from store.adapters import ADAPTER_HEARTBEAT, adapters_away_seconds
from store.box_failures import ENDED_BY_HOST
from store.schema import OutageTable, SessionTable

RECORD_SECONDS = 5.0
"""The interval at which the watcher writes the outages that it has observed."""

_WITH_A_BOX = text("""
WITH had AS (
  SELECT range_agg(tstzmultirange(tstzrange(live_at, greatest(live_at, coalesce(released_at, now())))) - coalesce((
    SELECT range_agg(tstzrange(began_at, greatest(began_at, ended_at)))
    FROM outage WHERE ended_at > live_at AND provider_id ^@ split_part(part, ' ', 3)), '{}')) AS box
  FROM sandbox WHERE rollout_id = :rollout_id AND workflow_id = :workflow_id AND live_at IS NOT NULL
    AND release_reason <> :ended_by_host
), waits AS (
  SELECT range_agg(span) AS engine FROM session, unnest(engine_waits) AS span WHERE rollout_id = :rollout_id
)
SELECT coalesce(sum(extract(epoch FROM upper(span) - lower(span))), 0)
FROM had, waits, unnest(had.box - coalesce(waits.engine, '{}')) AS span
""")

_AWAY_SINCE = """
SELECT coalesce(sum(extract(epoch FROM upper(span) - lower(span))), 0)
FROM (SELECT min(created_at) AS at FROM session_token WHERE session_id = {session_id}) AS first_token,
LATERAL (
  SELECT unnest(range_agg(tstzrange(greatest(began_at, at), greatest(began_at, at, ended_at)))) AS span
  FROM outage WHERE part {of} AND ended_at > at
) AS recorded
"""
_RECORDED_AWAY: ColumnElement[float] = literal_column(
    "(" + _AWAY_SINCE.format(session_id="session.id", of=f"IN ('adapter', 'postgres', '{ADAPTER_HEARTBEAT}')") + ")"
)
"""The part of a session's time without an adapter that is in the table `outage`; heartbeats of adapters need both."""
_OF_GATEWAY = text(
    _AWAY_SINCE.format(session_id=":session_id", of="^@ 'gateway' AND :box_id ^@ split_part(part, ' ', 3)")
)


@dataclass(slots=True, frozen=True)
class Outage:
    """A time in which `part` did not answer; its end moves on while it lasts."""

    part: str
    began_at: datetime
    ended_at: datetime


async def record_outages(connection: AsyncConnection, outages: Collection[Outage]) -> None:
    """Write outages, or their new ends; safe to repeat."""
    statement = insert(OutageTable).values([asdict(outage) for outage in outages])
    later = {"ended_at": func.greatest(OutageTable.ended_at, statement.excluded.ended_at)}
    await connection.execute(statement.on_conflict_do_update(index_elements=["part", "began_at"], set_=later))


async def seconds_with_a_box(connection: AsyncConnection, rollout_id: int, workflow_id: str) -> float:
    """Return for how long the workflow has had a box for this rollout, outside of outages and waits.

    Waits are those that its agents' budgets do not count either: for an engine and for an adapter. What overlaps is
    left out once. What the table `outage` has of the time without an adapter stays left out when the session is closed;
    the gap in the heartbeats that lasts now is not in it, and is left out for open sessions. Time for which a box is
    requested does not count: the service has no room for it, or is away. Neither do boxes whose try was ended by their
    worker's machine.
    """
    arguments = {"rollout_id": rollout_id, "workflow_id": workflow_id, "ended_by_host": ENDED_BY_HOST}
    had = float((await connection.execute(_WITH_A_BOX, arguments)).scalar_one())
    since_first_token = adapters_away_seconds() - func.coalesce(SessionTable.away_before, adapters_away_seconds())
    unrecorded = func.greatest(0.0, since_first_token - _RECORDED_AWAY)
    # Of several open sessions, the oldest one has the time of the others.
    away = func.max(unrecorded).filter(SessionTable.state == SessionState.OPEN)
    of_rollout = select(func.coalesce(away, 0.0)).where(SessionTable.rollout_id == rollout_id)
    return max(0.0, had - float((await connection.execute(of_rollout)).scalar_one()))


async def add_suspension(connection: AsyncConnection, session_id: int, seconds: float) -> None:
    """Record that the session's agent has been suspended for `seconds` until now, which is not its time.

    It is kept as a wait, so that a wait for an engine or an adapter during it counts once. Safe to repeat.
    """
    mine = select(SessionTable.id).where(SessionTable.id == session_id).with_for_update(key_share=True)
    await connection.execute(mine)  # because add_engine_waits skips a session that another transaction has locked
    now = datetime.now(UTC)
    await sessions.add_engine_waits(
        connection, {session_id: [sessions.EngineWait(now - timedelta(seconds=seconds), now)]}
    )


async def gateway_away_seconds(connection: AsyncConnection, session_id: int, box_id: str) -> float:
    """Return for how long the box's gateway has been away since the session's first token, as far as it is recorded.

    If the gateway is on another host, the agent's calls do not reach the adapter in this time.
    """
    return float((await connection.execute(_OF_GATEWAY, {"session_id": session_id, "box_id": box_id})).scalar_one())
