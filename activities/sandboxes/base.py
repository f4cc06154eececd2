"""The contract of a sandbox back end: what a box can do, and what may go wrong.

Why here: stages and harnesses are written against these Protocols and know no vendor.
Called by: activities; implemented by one file per back end in this folder. Knows nothing of Temporal.

Errors, for every method of both Protocols unless it says more: SandboxGoneError (the box is no more, a new one is
the only remedy), SandboxBusyError (busy, rate-limited or unreachable: the same call may go through later).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`exit_code` is -1 for a command that a signal ended. Undecodable output bytes are replaced."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A live box as its service lists it; `started_at` is in UTC."""

    id: str
    metadata: dict[str, str]
    started_at: datetime
    state: Literal["running", "paused"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a back end offers beyond the contract; stages ask here and never for the vendor's name. `limits`: those that
    a create asks for."""

    pause: bool
    network_policy: bool
    limits: bool
    max_ttl_seconds: int


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """What one box may use; None: what its service gives every box."""

    memory_bytes: int | None = None
    num_cpus: float | None = None
    max_processes: int | None = None


class Sandbox(Protocol):
    """One box. As an async context manager it is killed on exit."""

    @property
    def id(self) -> str: ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        check: bool = True,
        timeout: float | None = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> CommandResult:
        """Runs `cmd` in a login shell and waits for it; `timeout` is in seconds, None waits for ever.

        Raises CommandFailedError: for a non-zero exit if `check`, and always when it ran out of time (it is killed
        then). A command that cannot start (no such user or directory) counts as exit code 126, as in a shell. Never
        raises anything else but the two errors above. """
        ...

    async def start_detached(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> None:
        """Starts `cmd` in a login shell and returns; it goes on without us until it or the box ends. Its output is
        nobody's: redirect it.

        Raises CommandFailedError (126) when it cannot start.
        """
        ...

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        """Writes the bytes, the text as UTF-8, or the local file at a Path; makes parents; the user owns the result.

        Raises CommandFailedError when the box refuses the path or its disk is full.
        """
        ...

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        """The file, of a longer one its first `max_bytes`; for any size there is `fetch_file`.

        Raises FileNotFoundError for a missing file, CommandFailedError for what is no regular file.
        """
        ...

    async def fetch_file(self, path: str, target: Path, *, user: str = "root") -> None:
        """Streams the file into the local file `target`; raises as `read_file`, and may then leave a part of it
        there."""
        ...

    async def set_ttl(self, seconds: int) -> None:
        """The box ends this many seconds from now, sooner or later than before."""
        ...

    async def kill(self) -> None:
        """Ends the box. One that is gone already counts as success."""
        ...

    async def close(self) -> None:
        """Drops what the client holds; the box lives on."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class SandboxProvider(Protocol):
    """A service that makes boxes."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        env: Mapping[str, str] | None = None,
        network: bool = True,
        limits: BoxLimits | None = None,
    ) -> Sandbox:
        """Boots a box. Asked again with the same key it gives the same box, so a retry leaks none.

        `network` False: nothing can be reached from it, the adapter included.

        Raises ConfigError when the service does not know the image, cannot hold one of the limits, or refuses the
        request or the key. """
        ...

    async def connect(self, sandbox_id: str) -> Sandbox:
        """A handle on a box that somebody else created."""
        ...

    async def kill(self, sandbox_id: str) -> bool:
        """Whether there was a box to kill."""
        ...

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        """All live boxes that carry every one of these entries."""
        ...

    async def close(self) -> None:
        """Drops what the client holds; the boxes live on."""
        ...
