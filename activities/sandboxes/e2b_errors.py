"""Translate exceptions of the E2B SDK into the errors of the sandbox contract."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ratchet.errors import ConfigError, RatchetError, SandboxBusyError, SandboxGoneError

_RETRYABLE_STATUS = 500


def sdk_errors() -> tuple[type[Exception], ...]:
    """Return every exception class that the SDK and its transports raise for a failed call."""
    from connectrpc.errors import ConnectError
    from e2b.exceptions import AuthenticationException, SandboxException, ServiceBusyException
    from pyqwest import ReadError, StreamError, WriteError

    return (
        SandboxException, AuthenticationException, ServiceBusyException, ConnectError,
        ReadError, StreamError, WriteError, httpx.HTTPError, OSError,
    )  # fmt: skip


@contextmanager
def translated_errors(subject: str, missing: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Translate exceptions of the block. `missing`: class of the error for a status 404."""
    try:
        with cancellable():
            yield
    except sdk_errors() as error:
        raise translate(error, subject, missing) from error


@contextmanager
def cancellable() -> Iterator[None]:
    """Leave a task that is cancelled in the block cancelled.

    The SDK's transport (connectrpc) turns a cancellation into an error of its own, which its command handle may drop,
    so that the canceller would wait for ever. Clean-up of a task that was cancelled before the block is not disturbed.
    """
    task = asyncio.current_task()
    assert task is not None, "the SDK runs in a task"
    before = task.cancelling()
    try:
        yield
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError


def translate(error: Exception, subject: str, missing: type[ConfigError] = ConfigError) -> RatchetError:
    """The only mapping from the SDK's exceptions to errors of this program; ConfigError for refusals that are final,
    `missing` for one with the status 404."""
    from e2b import exceptions as sdk

    words = f"{subject}: {error}" if str(error) else f"{subject}: {type(error).__name__}"
    if isinstance(error, (sdk.SandboxNotRunningException, sdk.SandboxNotFoundException)):
        return SandboxGoneError(words)
    if isinstance(error, (sdk.ServiceBusyException, sdk.RateLimitException)):
        return SandboxBusyError(words, is_full=True)
    if isinstance(error, sdk.TimeoutException):
        return SandboxBusyError(words)
    if isinstance(error, sdk.AuthenticationException):
        return ConfigError(f"The sandbox service refuses the API key or the user: {words}")
    if isinstance(error, sdk.SandboxException):
        refused = (sdk.InvalidArgumentException, sdk.NotFoundException, sdk.NotEnoughSpaceException)
        if not isinstance(error, refused) and not _is_client_error(error):
            return SandboxBusyError(words)
        kind = missing if getattr(error, "status_code", None) == 404 or "404:" in str(error)[:4] else ConfigError
        return kind(f"The sandbox service refuses {words}")
    return SandboxBusyError(words)


def _is_client_error(error: Exception) -> bool:
    """Return whether the service refused the request itself: a status below 500, or a Connect refusal of that kind."""
    status = getattr(error, "status_code", None)
    if status is not None:
        return bool(status < _RETRYABLE_STATUS)
    text = str(error)
    codes = ("400:", "403:", "404:", "405:", "409:", "413:", "415:", "501:")
    words = ("UNIMPLEMENTED", "FAILED_PRECONDITION", "PERMISSION_DENIED", "ALREADY_EXISTS")
    return text.startswith(codes) or any(word in text.upper().partition(":")[0] for word in words)


def is_plain_timeout(error: Exception) -> bool:
    """Return whether the command's own limit expired; subclasses mean that the box is gone or unreachable."""
    from e2b.exceptions import TimeoutException

    return type(error) is TimeoutException
