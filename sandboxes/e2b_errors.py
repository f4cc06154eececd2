"""Translate exceptions of the E2B SDK into the errors of the sandbox contract.

The service, the way to it and the box answer through the same calls. Only a refusal of what a call itself asks for is
final; everything else, also an answer that the SDK cannot read, is waited for.
"""

import asyncio
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager

import httpx

from ratchet.errors import (
    ConfigError,
    RatchetError,
    SandboxBusyError,
    SandboxFullError,
    SandboxGoneError,
    SandboxRefusesError,
)
from ratchet.unexplained_errors import log_unexplained

CONTENT_REFUSED = frozenset({400, 404, 413, 415, 422})
"""Statuses with which the service refuses the content of a request. With others (401, 402, 403, ...) it refuses the
caller or does not know the route."""
BOX_REFUSED = frozenset(range(400, 500)) | {501, 507}
"""Statuses with which a box may refuse a command or a file."""
FILE_REFUSED = BOX_REFUSED | {500}
"""E2B's own box answers 500 to most errors of a path, such as a name that is too long."""
_UNKNOWN_STATUS = 599
_PAGE = re.compile(r"[^:]*: \s*<")
_CONNECT = {
    "internal": 500,
    "unimplemented": 501,
    "failed_precondition": 400,
    "permission_denied": 403,
    "already_exists": 409,
    "out_of_range": 400,
}


@contextmanager
def translated_errors(subject: str, final: Container[int] = ()) -> Iterator[None]:
    """Translate exceptions of the block, which makes calls of the SDK only, as `translate` does."""
    try:
        with cancellable():
            yield
    except RatchetError:
        raise
    except Exception as error:
        raise translate(error, subject, final) from error


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


def translate(error: Exception, subject: str, final: Container[int] = ()) -> RatchetError:
    """The only mapping of the SDK's exceptions, as `error_of_status`; unknown ones are outages: SandboxBusyError."""
    from e2b import exceptions as sdk

    words = f"{subject}: {error}" if str(error) else f"{subject}: {type(error).__name__}"
    if isinstance(error, (sdk.SandboxNotRunningException, sdk.SandboxNotFoundException)):
        return SandboxGoneError(words)
    if isinstance(error, (sdk.ServiceBusyException, sdk.RateLimitException)):
        return SandboxFullError(words)
    if isinstance(error, sdk.TimeoutException):
        return SandboxBusyError(words)
    if not isinstance(error, (sdk.SandboxException, sdk.AuthenticationException)):
        if not isinstance(error, (OSError, httpx.TransportError)):  # which are outages, and no bug of this program
            log_unexplained("unknown error of a call to the sandbox service; it is repeated", error, subject=subject)
        return SandboxBusyError(f"{words} ({type(error).__name__}: the service's answer could not be read)")
    status = _status(error)
    is_proxys = status >= 500 and _PAGE.match(str(error))
    return error_of_status(status, words, () if is_proxys else final)


def error_of_status(
    status: int, words: str, final: Container[int] = (), missing: type[ConfigError] = ConfigError
) -> RatchetError:
    """Return the error of a refusal with this HTTP status.

    `final`: statuses that refuse the content of this call: ConfigError, `missing` for 404. Any other status below 500
    refuses the caller: SandboxRefusesError.
    """
    if status in final:
        return (missing if status == 404 else ConfigError)(f"The sandbox service refuses {words}")
    if status in (429, 503):
        return SandboxFullError(words)
    if status < 500 and status not in (408, 425):
        return SandboxRefusesError(f"The sandbox service refuses {words}")
    return SandboxBusyError(words)


def _status(error: Exception) -> int:
    """Return the HTTP status that an exception of the SDK stands for, 599 if it stands for none."""
    from e2b import exceptions as sdk

    known: dict[type[Exception], int] = {
        sdk.AuthenticationException: 401,
        sdk.InvalidArgumentException: 400,
        sdk.NotFoundException: 404,
        sdk.NotEnoughSpaceException: 507,
    }
    for kind, status in known.items():
        if isinstance(error, kind):
            return status
    if (given := getattr(error, "status_code", None)) is not None:
        return int(given)
    first = str(error).partition(":")[0]
    if first.isdecimal() and len(first) == 3:
        return int(first)
    # A code of Connect's: its name stands in front, in the form of the class that the SDK prints.
    for code, status in _CONNECT.items():
        if code in first.lower():
            return status
    return _UNKNOWN_STATUS


def is_plain_timeout(error: Exception) -> bool:
    """Return whether the command's own limit expired; subclasses mean that the box is gone or unreachable."""
    from e2b.exceptions import TimeoutException

    return type(error) is TimeoutException
