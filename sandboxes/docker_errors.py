"""Translate errors of the Docker daemon into the errors of the sandbox contract."""

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from ratchet.errors import ConfigError, RatchetError, SandboxBusyError, SandboxGoneError
from ratchet.unexplained_errors import log_unexplained

_CANNOT_START_WORDS = ("unable to find user", "no matching entries", "OCI runtime exec failed", "chdir")
_MISSING_WORDS = ("no such container", "no such image", "network")
"""Words of a 404 that is about the box or what it is made from; a proxy answers 404, too, for an address."""


async def remove_container(container: DockerContainer) -> bool:
    """Remove a container; return False if another call removes it already. A missing one raises DockerError."""
    try:
        await container.delete(force=True)
    except DockerError as error:
        if error.status != 409:
            raise
        return False
    return True


async def require_running(container: DockerContainer) -> None:
    """Raise SandboxGoneError if the container does not run."""
    with service_errors(container.id):
        is_running = (await container.show())["State"]["Running"]
    if not is_running:
        raise SandboxGoneError(f"box {container.id} does not run any more")


@contextmanager
def service_errors(subject: str, missing: type[RatchetError] = SandboxGoneError) -> Iterator[None]:
    """Translate errors of the block. `missing`: class of the error if the daemon does not know the object. Only a
    refusal that is recognised is final. Any other error can go away, also an answer that cannot be read."""
    try:
        yield
    except RatchetError:
        raise
    except DockerError as error:
        raise _translate(error, subject, missing) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = error or type(error).__name__
        raise SandboxBusyError(f"the Docker daemon cannot be reached for {subject}: {reason}") from error
    except Exception as error:
        log_unexplained("unknown error of a call to the Docker daemon; it is repeated", error, subject=subject)
        reason = f"{type(error).__name__}: {error}"
        raise SandboxBusyError(f"the Docker daemon gives no usable answer for {subject}: {reason}") from error


def _translate(error: DockerError, subject: str, missing: type[RatchetError]) -> RatchetError:
    """The only mapping from the daemon's answers to errors of this program."""
    words = f"{subject}: {error.message}"
    if error.message.lstrip().startswith("<"):  # the page of a proxy
        return SandboxBusyError(words)
    if any(part in error.message for part in _CANNOT_START_WORDS):
        return ConfigError(f"Docker refuses {words}")
    # An exec may be missing although its box lives: a daemon that was started anew has lost its execs.
    if error.status == 404 and any(part in error.message.lower() for part in _MISSING_WORDS):
        return missing(words)
    if error.status == 409 and ("not running" in error.message or "removal" in error.message):
        return SandboxGoneError(words)
    if error.status in (400, 403):
        return ConfigError(f"Docker refuses {words}")
    return SandboxBusyError(words)
