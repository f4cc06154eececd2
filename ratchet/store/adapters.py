"""How long no adapter was there: agents cannot work meanwhile, and their clocks must not run on.

Why here: the account has to outlive the adapter, the worker and the whole stack, so it is kept where the next one finds it.
Called by: `adapter/heartbeat.py` (beats), `sessions.py` (what an attempt lost to it).

Every beat adds the gap since the last one, if it was longer than a live adapter ever leaves, to one growing sum. Two readings of the
sum say how much was lost between them, with any number of adapters and with nobody watching.
"""

from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import ColumnElement

from ratchet.store.schema import InstallationTable

BEAT_SECONDS = 2.0
_GAP_SECONDS = 10.0


def _missing() -> ColumnElement[Any]:
    silent = func.extract("epoch", func.now() - InstallationTable.adapter_seen_at)
    return case((silent > _GAP_SECONDS, silent), else_=0.0)


async def heartbeat_adapters(connection: AsyncConnection) -> None:
    """An adapter is there."""
    here = {"adapter_away_seconds": InstallationTable.adapter_away_seconds + _missing(), "adapter_seen_at": func.now()}
    await connection.execute(
        insert(InstallationTable).values(singleton=True).on_conflict_do_update(index_elements=["singleton"], set_=here)
    )


def adapters_away_seconds() -> ColumnElement[Any]:
    """The sum up to now, as an expression; 0 where no adapter has ever been."""
    return func.coalesce(select(InstallationTable.adapter_away_seconds + _missing()).scalar_subquery(), 0.0)
