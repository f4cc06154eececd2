"""Where errors of ours become decisions of Temporal, and where long stages heartbeat.

Why here: retry is opt-in by error class, in one place: whatever `ratchet.errors` does not mark retryable ends the activity for good.
Called by: every activity of this folder.
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from ratchet.background_task import running_beside
from ratchet.errors import BugError, RatchetError, SandboxBusyError

_LOG = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")


def _as_application_error(error: RatchetError) -> ApplicationError:
    delay, category = None, ApplicationErrorCategory.UNSPECIFIED
    if isinstance(error, SandboxBusyError):
        category = ApplicationErrorCategory.BENIGN  # expected under load: no stack trace in the worker's log
        # Jitter: a service that turned forty boots away must not see the forty again in the same second.
        delay = timedelta(seconds=(error.retry_after_seconds or 2.0) * random.uniform(0.7, 1.6))
    return ApplicationError(
        str(error),
        type=type(error).__name__,
        non_retryable=not error.retryable,
        next_retry_delay=delay,
        category=category,
    )


def activity_stage(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Declares an activity method called `name` and classifies what it raises; the one catch-all of the activities."""

    def declare(method: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(method)
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return await method(*args, **kwargs)
            except RatchetError as error:
                raise _as_application_error(error) from error
            except Exception as error:
                _LOG.exception("bug", stage=name)
                raise _as_application_error(BugError(f"{name}: {type(error).__name__}: {error}")) from error

        return activity.defn(name=name)(run)

    return declare


@contextlib.asynccontextmanager
async def heartbeating(details: Callable[[], Awaitable[Any]] | None = None) -> AsyncIterator[None]:
    """Heartbeats three times per heartbeat timeout while the block runs. `details` are for display only: throttled and stale."""
    timeout = activity.info().heartbeat_timeout
    interval = timeout.total_seconds() / 3 if timeout else 10.0

    async def beat() -> None:
        while True:
            shown: tuple[Any, ...] = ()
            if details is not None:
                with contextlib.suppress(RatchetError):  # a display that cannot be made must not end the stage
                    shown = (await details(),)
            activity.heartbeat(*shown)
            await asyncio.sleep(interval)

    async with running_beside(beat()):
        yield
