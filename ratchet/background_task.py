"""Run a coroutine beside a block of code, such as a heartbeat or the renewal of a lease."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextvars import Context
from typing import Any


def start_process_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task that serves the whole process, so that its log lines have no ids of the call that starts it."""
    return asyncio.create_task(work, context=Context())


@contextlib.asynccontextmanager
async def running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work`, which does not end by itself, until the block ends; an error of `work` is raised then."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
