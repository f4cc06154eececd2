"""Run a coroutine beside a block of code, such as a heartbeat or the renewal of a lease, or work in a thread that may
hang."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


def start_process_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task that serves the whole process, so that its log lines have no ids of the call that starts it."""
    return asyncio.create_task(work, context=Context())


@contextlib.asynccontextmanager
async def running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work`, which does not end by itself, until the block ends; an error of `work` is raised then.

    If the caller is cancelled while `work` ends, that is raised once it has ended.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        try:
            await asyncio.wait({task})  # `await task` could not tell the caller's cancellation from the task's
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise
        if not task.cancelled():
            task.result()


async def in_abandonable_thread(work: Callable[[], _T], seconds: float | None = None) -> _T:
    """Return what `work` returns in a daemon thread.

    After `seconds`, or if the caller is cancelled, the thread is left behind: it keeps no process from ending. Raises
    what `work` raises, and TimeoutError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(settling: Callable[[], None]) -> None:
        if not done.done():
            settling()

    def run() -> None:
        try:
            result = work()
        except BaseException as raised:
            settling = partial(done.set_exception, raised)
        else:
            settling = partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, settling)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(seconds):
        return await done
