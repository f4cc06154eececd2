"""The contract of a sandbox back end: what a box can do, and which errors it raises.

Stages and harnesses use these Protocols and know no vendor; each back end is one file of this folder, chosen in
`registry.py`. Every method of both Protocols may raise SandboxGoneError (the box is gone, only a new one helps) and
SandboxBusyError (busy, rate-limited or unreachable; the same call may succeed later).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, Self

from ratchet.errors import CommandFailedError


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command. `exit_code`: -1 if a signal ended it. Undecodable output bytes are replaced."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Command:
    """The arguments of `Sandbox.exec`."""

    cmd: str
    user: str
    timeout: float | None
    env: Mapping[str, str]
    cwd: str | None
    on_stderr: Callable[[str], None] | None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A live box, as the service describes it; times in UTC. `metadata` is empty, `ends_at` None if it tells none."""

    id: str
    metadata: dict[str, str]
    started_at: datetime
    state: Literal["running", "paused"]
    ends_at: datetime | None = None

    def carries(self, metadata: Mapping[str, str]) -> bool:
        """Return whether the box has all of these metadata entries."""
        return metadata.items() <= self.metadata.items()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a back end; stages ask for these and not for the vendor. `limits`: those of `create`.
    `without`: what a run does without, one sentence each, which it says at its start."""

    pause: bool
    network_policy: bool
    limits: bool
    max_ttl_seconds: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenedFirst:
    """The network of a box that is open until `set_network(then)`."""

    then: bool


Network = bool | Literal["open"] | OpenedFirst
"""True: the box can reach the adapter and nothing else; False: nothing; `open`: all that the service allows."""
OPEN_NETWORK = "an agent's box reaches more than the adapter, so an agent could download a solution"


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """Limits of one box; None: the service's own."""

    memory_bytes: int | None = None
    num_cpus: float | None = None
    max_processes: int | None = None


class Sandbox(Protocol):
    """One box; used as an async context manager, it is killed on exit."""

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
        on_stderr: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run `cmd` in a login shell and wait for it; `timeout` in seconds, None for unlimited.

        `on_stderr` gets each piece of the error output as it comes; it returns at once and raises nothing.

        Raises CommandFailedError for a non-zero exit code if `check`, and for a time-out always, after killing the
        shell; some services let what it has started go on. A child in the background redirects its output, for which
        some services wait. A command that cannot start (unknown user or directory) has exit code 126, as in a shell.
        Raises no other errors than these three.
        """
        result = await self.run(Command(cmd, user, timeout, env or {}, cwd, on_stderr))
        if check and result.exit_code != 0:
            raise CommandFailedError(cmd, result.exit_code, result.stdout, result.stderr)
        return result

    async def run(self, command: Command) -> CommandResult:
        """Run a command for `exec`, which then looks at the exit code. A class with its own `exec` needs none."""
        raise NotImplementedError

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        """Write the bytes, the text as UTF-8, or the local file at a Path; make parents; the user owns the result.
        Raises CommandFailedError if the box refuses the path or its disk is full."""

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        """Return at most `max_bytes`. Raises FileNotFoundError; CommandFailedError for other than regular files."""

    async def set_ttl(self, seconds: int) -> None:
        """Set the time to live to this many seconds from now, shorter or longer than before."""

    async def set_network(self, network: bool) -> None:
        """Close the network of a box made with OpenedFirst; open connections end or are cut off. Not tried on E2B."""

    async def kill(self) -> None:
        """End the box; a missing one counts as success."""

    async def close(self) -> None:
        """Close the client's connection, if the provider does not hold it; the box lives on."""
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()


class SandboxProvider(Protocol):
    """A service that creates boxes."""

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
        network: Network = True,
        limits: BoxLimits | None = None,
    ) -> Sandbox:
        """Create a box. A repeated call with the same key returns the same box, so that a retry leaks none.

        Raises ConfigError if the service does not know the image, does not support a limit or the network, or refuses
        the request or the key.
        """

    async def connect(self, sandbox_id: str) -> Sandbox:
        """Return a handle on an existing box."""

    async def kill(self, sandbox_id: str) -> bool:
        """Kill a box; return whether it existed."""

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        """Return what the service knows of a live box now."""

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        """Return all live boxes that carry these metadata entries, and no others even if the service returns them."""

    async def close(self) -> None:
        """Close the client's connections; the boxes live on."""


class ImageBuilder(Protocol):
    """Builds images for the boxes of one service."""

    async def build(self, image: str, context: bytes, on_lines: Callable[[str], None]) -> None:
        """Build `image` from a tar.gz with a Dockerfile; afterwards the service has it. Idempotent.

        `on_lines` gets what the build prints. Raises BuildFailedError, SandboxBusyError if the service cannot be
        reached or this machine lacks what the build needs.
        """
