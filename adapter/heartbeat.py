"""Says every two seconds that an adapter is there.

Why here: the time that no adapter was there is not an agent's own, and only a living adapter can say when it ended.
Called by: `app.py`, for as long as the app serves.
"""

import asyncio
from collections.abc import Callable

import structlog

from ratchet.errors import StoreUnavailableError
from ratchet.store import adapters
from ratchet.store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")


async def heartbeat_adapter(database: Database, ready: Callable[[], bool]) -> None:
    """Beats from the moment that calls can be answered, until cancelled. While the store is away none can be served either: the silence
    is the truth."""
    while not ready():
        await asyncio.sleep(0.2)
    while True:
        try:
            async with database.begin() as connection:
                await adapters.heartbeat_adapters(connection)
        except StoreUnavailableError as error:
            _LOG.warning("presence not recorded", reason=str(error))
        except Exception:  # without this loop every agent's clock would stand still for good
            _LOG.exception("presence not recorded")
        await asyncio.sleep(adapters.BEAT_SECONDS)
