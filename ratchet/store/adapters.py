"""Time without any adapter, during which agents cannot work and their time budgets must not count.

Each heartbeat adds the gap since the last one to a growing sum, if the gap is longer than a live adapter leaves. The
difference of two readings is the time lost between them, for any number of adapters and across restarts of all parts.
"""

from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import ColumnElement

from ratchet.store.schema import InstallationTable

BEAT_SECONDS = 2.0
_LONGEST_NORMAL_GAP_SECONDS = 10.0


def _gap_seconds() -> ColumnElement[Any]:
    silent = func.extract("epoch", func.now() - InstallationTable.adapter_seen_at)
    return case((silent > _LONGEST_NORMAL_GAP_SECONDS, silent), else_=0.0)


async def heartbeat_adapters(connection: AsyncConnection) -> None:
    """Record an adapter's heartbeat."""
    here = {
        "adapter_away_seconds": InstallationTable.adapter_away_seconds + _gap_seconds(),
        "adapter_seen_at": func.now(),
    }
    await connection.execute(
        insert(InstallationTable).values(singleton=True).on_conflict_do_update(index_elements=["singleton"], set_=here)
    )


def adapters_away_seconds() -> ColumnElement[Any]:
    """Return an expression for the sum up to now, in seconds; 0 if there has never been an adapter."""
    return func.coalesce(select(InstallationTable.adapter_away_seconds + _gap_seconds()).scalar_subquery(), 0.0)
