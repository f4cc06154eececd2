"""Adapter heartbeat, every two seconds. Gaps above five seconds do not count against agents' time budgets."""

import asyncio
from collections.abc import Callable

import structlog

from adapter.store_outage import StoreOutage
from store import adapters
from store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")


async def heartbeat_adapter(database: Database, outage: StoreOutage, ready: Callable[[], bool]) -> None:
    """Write heartbeats from the moment that calls can be answered, until cancelled.

    While the store is unavailable, or a lock stops calls, no heartbeat is written, which is right: no call can be
    answered then. So `outage` knows of an outage also if no call is made.
    """
    while not ready():
        await asyncio.sleep(0.2)
    while True:
        try:
            await outage.hold(lambda: database.run(adapters.heartbeat_adapters))
        except Exception:  # if this loop ended, the time budget of every agent would stop running
            _LOG.exception("heartbeat not recorded")
        await asyncio.sleep(adapters.BEAT_SECONDS)
