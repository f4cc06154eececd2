"""The decorator of every activity, which classifies errors for Temporal, and the heartbeats of long activities.

Only errors that `ratchet.errors` marks as retryable are retried; any other error fails the activity for good.
"""

import asyncio
import contextlib
import functools
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import structlog
from asyncpg import ForeignKeyViolationError
from sqlalchemy.exc import IntegrityError, NoResultFound
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from ratchet.background_task import running_beside
from ratchet.errors import (
    BugError,
    FencedError,
    RatchetError,
    SandboxBusyError,
    SuspectPatchError,
    TemporalUnavailableError,
    WorkerHostError,
)
from ratchet.machine_faults import describe_refusal, is_machine_fault
from ratchet.secrets import without_secrets
from ratchet.storable_values import storable_text
from ratchet.temporal_client import is_too_large, one_line

_LOG = structlog.get_logger()

_REFUSED_FOR_ITS_CONTENT = frozenset(
    {
        RPCStatusCode.INVALID_ARGUMENT,
        RPCStatusCode.NOT_FOUND,
        RPCStatusCode.ALREADY_EXISTS,
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.OUT_OF_RANGE,
        RPCStatusCode.UNIMPLEMENTED,
    }
)

_BEAT_SECONDS = 10.0
BEGUN = "begun"
"""Details of a heartbeat that has nothing else to say."""

P = ParamSpec("P")
R = TypeVar("R")


def _as_application_error(error: RatchetError) -> ApplicationError:
    delay = None
    category = ApplicationErrorCategory.UNSPECIFIED
    if isinstance(error, SandboxBusyError):
        category = ApplicationErrorCategory.BENIGN  # expected under load, so the worker logs no stack trace
        # Jitter, so that many refused boots do not come back in the same second.
        delay = timedelta(seconds=(error.retry_after_seconds or 2.0) * random.uniform(0.7, 1.6))
    details = [error.suspicion] if isinstance(error, SuspectPatchError) else []
    return ApplicationError(
        storable_text(without_secrets(str(error))),
        *details,
        type=type(error).__name__,
        non_retryable=not error.retryable,
        next_retry_delay=delay,
        category=category,
    )


def _logged_bug(name: str, error: Exception) -> BugError:
    """Log the exception that is being handled, with its traceback, and return the error of its stage."""
    _LOG.error("bug", stage=name, traceback=without_secrets(traceback.format_exc()))
    return BugError(f"{name}: {type(error).__name__}: {error}")


def _lacks_a_row(error: Exception) -> bool:
    """Return whether a row that the workflow names is not in the store, to be read or to be referred to."""
    cause = error.orig.__cause__ if isinstance(error, IntegrityError) and error.orig else None
    return isinstance(error, NoResultFound) or isinstance(cause, ForeignKeyViolationError)


def _fenced(name: str) -> FencedError:
    _LOG.warning("row missing", stage=name, traceback=traceback.format_exc())
    return FencedError(f"{name}: the store lacks a row that the workflow names; its state may be an older one")


def _outage(name: str, error: OSError | RPCError) -> RatchetError | None:
    """Return the error of a machine or a server that may work again later; None for a mistake of this program."""
    if isinstance(error, RPCError):
        if error.status in _REFUSED_FOR_ITS_CONTENT or is_too_large(error):
            return None
        return TemporalUnavailableError(f"{name}: Temporal does not answer: {one_line(error)}")
    if not is_machine_fault(error):
        return None
    return WorkerHostError(f"{name}: the worker's machine {describe_refusal(error)}")


def activity_stage(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Declare a method as the activity type `name`, and turn what it raises into ApplicationError.

    An answer of the machine or of Temporal that may change is tried again. Any other exception that is no RatchetError
    is logged and becomes a BugError.
    """

    def declare(method: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(method)
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return await method(*args, **kwargs)
            except ApplicationError:  # of a stage that this one has called
                raise
            # From None: Temporal stores the causes of an error, too, and their stack traces.
            except RatchetError as error:
                raise _as_application_error(error) from None
            except (OSError, RPCError) as error:
                if (outage := _outage(name, error)) is None:
                    raise _as_application_error(_logged_bug(name, error)) from None
                _LOG.warning("stage cannot go on now", stage=name, reason=without_secrets(str(outage)))
                raise _as_application_error(outage) from None
            except Exception as error:
                found = _fenced(name) if _lacks_a_row(error) else _logged_bug(name, error)
                raise _as_application_error(found) from None

        return activity.defn(name=name)(run)

    return declare


@contextlib.asynccontextmanager
async def heartbeating(details: Callable[[], Awaitable[Any]] | None = None) -> AsyncIterator[None]:
    """Send heartbeats while the block runs, at least three per heartbeat timeout.

    Their answers say whether the activity is cancelled, so they come much more often than the timeout needs.

    `details` are for display only. A heartbeat never waits for them: it carries the newest that are known, so that a
    slow store does not make a living activity look dead.
    """
    timeout = activity.info().heartbeat_timeout
    interval = min(timeout.total_seconds() / 3, _BEAT_SECONDS) if timeout else _BEAT_SECONDS
    displayed: tuple[Any, ...] = (BEGUN,)

    async def beat() -> None:
        while True:
            activity.heartbeat(*displayed)
            await asyncio.sleep(interval)

    async def renew_details(read: Callable[[], Awaitable[Any]]) -> None:
        nonlocal displayed
        while True:
            try:
                displayed = (await read(),)
            except RatchetError:  # the store is away, for example
                pass
            except Exception as error:  # what is only displayed must not end the activity
                _LOG.error("bug", stage=activity.info().activity_type, details=f"{type(error).__name__}: {error}")
                return
            await asyncio.sleep(interval)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running_beside(beat()))
        if details is not None:
            await stack.enter_async_context(running_beside(renew_details(details)))
        yield
