"""Work that goes on beside a block of code and ends with it.

Why here: heartbeats and leases are kept by the same few lines, in activities and in the learner.
Called by: `activities/stage.py`, `activities/agent.py`, `engine/weight_update.py`, `engine/server.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work`, which never ends by itself, for as long as the block runs. An error of its own is raised when the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
