"""The live adapter processes, and the time without any, during which agents' time budgets must not count.

A process has one lease for all of its calls. If it is not renewed, another process may take these calls over; their
rows are not written meanwhile.

Each heartbeat adds the gap since the last one to a growing sum, if the gap is longer than a live adapter leaves. The
difference of two readings is the time lost between them, for any number of adapters and across restarts of all parts.
The gap is also written to the table `outage`, by which it is known what else was away at the same time.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import DateTime, Interval, bindparam, case, delete, exists, func, literal, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.elements import ColumnElement

from store.schema import AdapterProcessTable, EngineTable, InstallationTable, OutageTable

BEAT_SECONDS = 2.0
_LONGEST_NORMAL_GAP_SECONDS = 2.5 * BEAT_SECONDS
_FORGOTTEN_AFTER = timedelta(hours=1)
_MOST_AHEAD = timedelta(minutes=1)
"""A heartbeat further ahead was written before the server's clock was set back; it would hide outages until then."""
_LOCKS_OF_A_CALL = (
    # Calls write to these: also to `session` if they are refused, and to `rollout` if they are a session's first. In
    # this order, which is that of `write_turns`, or two that wait could wait for each other.
    "LOCK TABLE session, turn, rollout IN ROW EXCLUSIVE MODE",
    "LOCK TABLE session_token, engine IN ACCESS SHARE MODE",  # a call reads them
)
ADAPTER_HEARTBEAT = "adapter_heartbeat"
"""`outage.part` of a gap in the heartbeats, beside the outages of `adapter` that the watcher's probes find."""


def _gap_seconds(until: ColumnElement[Any] | None = None) -> ColumnElement[Any]:
    silent = func.extract("epoch", (func.now() if until is None else until) - InstallationTable.adapter_seen_at)
    return case((silent > _LONGEST_NORMAL_GAP_SECONDS, silent), else_=0.0)


async def heartbeat_adapters(connection: AsyncConnection) -> None:
    """Record an adapter's heartbeat, and the gap before it if there was one.

    It takes the locks of a call first, so that it waits if calls do: a table that an index is built on, or that an
    operator's open transaction has locked, stops every call, and that time must not count for the agents either.
    """
    for lock in _LOCKS_OF_A_CALL:
        await connection.exec_driver_sql(lock)
    # Not now(), which is the time before the locks were waited for.
    times = select(func.clock_timestamp(), select(InstallationTable.adapter_seen_at).scalar_subquery())
    here, seen = (await connection.execute(times)).one()
    if seen is not None and seen > here + _MOST_AHEAD:
        # The server's clock was set back. What lives writes these times again; what died would seem to live until the
        # clock has caught up.
        for column, latest in ((AdapterProcessTable.alive_until, here + _MOST_AHEAD), (EngineTable.heartbeat_at, here)):
            await connection.execute(update(column.class_).where(column > latest).values({column.key: latest}))
    await connection.execute(_MISSED, {"here": here})
    await connection.execute(_SEEN, {"here": here})


def _missed(here: ColumnElement[Any]) -> Insert:
    """The statement that records the gap before a heartbeat at the time `here`, if there was one."""
    gap = select(literal(ADAPTER_HEARTBEAT), InstallationTable.adapter_seen_at, here).where(_gap_seconds(here) > 0)
    missed = insert(OutageTable).from_select(["part", "began_at", "ended_at"], gap)
    later = {"ended_at": func.greatest(OutageTable.ended_at, missed.excluded.ended_at)}
    return missed.on_conflict_do_update(index_elements=["part", "began_at"], set_=later)


def _seen(here: ColumnElement[Any]) -> Insert:
    """The statement that records a heartbeat at the time `here`."""
    values = {
        "adapter_away_seconds": InstallationTable.adapter_away_seconds + _gap_seconds(here),
        "adapter_seen_at": case(
            (InstallationTable.adapter_seen_at > here + _MOST_AHEAD, here),
            else_=func.greatest(InstallationTable.adapter_seen_at, here),
        ),
    }
    first = insert(InstallationTable).values(singleton=True)
    return first.on_conflict_do_update(index_elements=["singleton"], set_=values)


# Built once: building a statement takes longer than running it.
_HERE = bindparam("here", type_=DateTime(timezone=True))
_MISSED = _missed(_HERE)
_SEEN = _seen(_HERE)


def adapters_away_seconds() -> ColumnElement[Any]:
    """Return an expression for the sum up to now, in seconds; 0 if there has never been an adapter."""
    return func.coalesce(select(InstallationTable.adapter_away_seconds + _gap_seconds()).scalar_subquery(), 0.0)


def adapters_alive_seconds(since: ColumnElement[Any]) -> ColumnElement[Any]:
    """Expression: seconds of heartbeats without a gap, at most since a time; 0 in a gap, NULL if the time is NULL."""
    gap_ended = select(func.max(OutageTable.ended_at)).where(OutageTable.part == ADAPTER_HEARTBEAT).scalar_subquery()
    alive = func.extract("epoch", func.now() - func.greatest(since, gap_ended))
    gap = func.coalesce(select(_gap_seconds()).select_from(InstallationTable).scalar_subquery(), 0.0)
    return case((since.is_(None), None), (gap > 0, 0.0), else_=func.greatest(0.0, alive))


_UNTIL = func.now() + bindparam("lasts", type_=Interval)
_RENEWAL = (
    insert(AdapterProcessTable)
    .values(id=bindparam("process_id"), alive_until=_UNTIL)
    .on_conflict_do_update(index_elements=["id"], set_={"alive_until": _UNTIL})
)


async def renew_process_lease(connection: AsyncConnection, process_id: str, seconds: float) -> None:
    """Let this process's lease last `seconds` from now."""
    await connection.execute(_RENEWAL, {"process_id": process_id, "lasts": timedelta(seconds=seconds)})


async def forget_ended_processes(connection: AsyncConnection) -> None:
    """Delete the leases of processes that were killed long ago."""
    ended = AdapterProcessTable.alive_until < func.now() - _FORGOTTEN_AFTER
    await connection.execute(delete(AdapterProcessTable).where(ended))


async def end_process_lease(connection: AsyncConnection, process_id: str) -> None:
    """End the lease of a process that shuts down, so that its calls can be taken over at once."""
    await connection.execute(delete(AdapterProcessTable).where(AdapterProcessTable.id == process_id))


def process_lives(process_id: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ColumnElement[bool]:
    """Return an expression for whether the lease of the process in this column has not expired."""
    lives = (AdapterProcessTable.id == process_id) & (AdapterProcessTable.alive_until > func.now())
    return exists().where(lives)
