"""Run a coroutine beside a block, such as a heartbeat, or work in a thread that may hang; and end on a signal."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import structlog

from ratchet.errors import RatchetError

_LOG = structlog.get_logger()
_T = TypeVar("_T")


def start_process_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task that serves the whole process, so that its log lines have no ids of the call that starts it."""
    return asyncio.create_task(work, context=Context())


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on; called in the event loop of the process."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the block ends. An error of `work` is logged and ends neither the block nor its success.

    If the caller is cancelled while `work` ends, that is raised once it has ended.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await wait_for_end(task)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("work beside a block has ended early", exc_info=error)


@contextlib.contextmanager
def errors_logged(event: str, **facts: object) -> Iterator[None]:
    """Log an error of the block in place of raising it, for one step of a loop that serves other work.

    The loop goes on, because any error may go away: an incomplete list of errors would end it for the process's life.
    """
    try:
        yield
    except RatchetError as error:
        _LOG.warning(event, reason=str(error), **facts)
    except Exception as error:
        _LOG.error(event, reason=repr(error), exc_info=error, **facts)


async def wait_for_end(task: "asyncio.Task[Any]") -> None:
    """Wait until a task has ended, also if the caller is cancelled meanwhile, which is raised then."""
    try:
        await asyncio.wait({task})  # `await task` could not tell the caller's cancellation from the task's
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def in_abandonable_thread(work: Callable[[], _T]) -> _T:
    """Return what `work` returns in a daemon thread, and raise what it raises.

    If the caller is cancelled, the thread is left behind: it keeps no process from ending.
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
    return await done
