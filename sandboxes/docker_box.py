"""One container as a box: commands are execs in it, and files are transferred through execs.

This module adds what the Docker API lacks for an exec: ending it, closing its input, and telling a failing command from
a dying box.
"""

import asyncio
import contextlib
import io
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from aiodocker.containers import DockerContainer
from aiodocker.execs import Exec
from aiodocker.stream import Stream

from ratchet.errors import CommandFailedError, ConfigError, SandboxBusyError, SandboxGoneError
from sandboxes.base import Command, CommandResult, Sandbox
from sandboxes.docker_errors import remove_container, require_running, service_errors
from sandboxes.docker_output import MARK_VARIABLE, MarkedStream, framed, new_mark

# Exit codes: of a shell (126, 137), and of the scripts below.
_CANNOT_START = 126
_KILLED = 137
_MISSING = 144
_NO_FILE = 145
_CUT = 146
_POLL_SECONDS = 0.01
_POLL_MAX_SECONDS = 0.5
_CHUNK_BYTES = 1 << 18
_TRANSFER_SECONDS = 600.0
_REMOVAL_SECONDS = 3.0
_ENDING_SECONDS = 300.0
"""The time beyond its time limit that a command may take, for its output to arrive."""
DEADLINE_FILE = "/run/ratchet-deadline"
_SET_LIFE = (
    "read -r up _ </proc/uptime; umask 077;"
    f" echo $((${{up%%.*}} + $1)) >{DEADLINE_FILE}.new && mv {DEADLINE_FILE}.new {DEADLINE_FILE}"
)
_READ = f'[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING}; [ -f "$1" ] || exit {_NO_FILE}; exec {{read}} -- "$1"'


class _ExecOutput(NamedTuple):
    exit_code: int
    stdout: bytes
    stderr: bytes


class DockerSandbox(Sandbox):
    """One container as a Sandbox."""

    def __init__(self, container: DockerContainer) -> None:
        self._container = container

    @property
    def id(self) -> str:
        return self._container.id

    async def run(self, command: Command) -> CommandResult:
        arguments = _login(command.cmd, command.cwd)
        if (timeout := command.timeout) is not None:
            # In the box, because the API cannot end an exec. KILL reaches the whole process group.
            arguments = ["timeout", "-s", "KILL", f"{timeout:.3f}", *arguments]
        started = time.monotonic()
        try:
            async with _time_limit(f"a command in box {self.id}", timeout and timeout + _ENDING_SECONDS):
                running = self._run(arguments, command.user, command.env, command.cwd, on_stderr=command.on_stderr)
                code, stdout, stderr = await running
        except CommandFailedError as unable:
            code, stdout, stderr = _CANNOT_START, b"", unable.stderr.encode()
        result = CommandResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if code == _CANNOT_START:  # the daemon also answers so for a box that is ending
            await require_running(self._container)
        if code == _KILLED:
            if timeout is not None and time.monotonic() - started >= timeout:
                await require_running(self._container)
                raise CommandFailedError(command.cmd, None, result.stdout, result.stderr, timed_out=True)
            await self._require_staying()
        return result

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        if isinstance(content, Path):
            size = (await asyncio.to_thread(content.stat)).st_size
        else:
            content = content.encode() if isinstance(content, str) else content
            size = len(content)
        # Reads exactly `size` bytes, because the API cannot close one direction of a stream.
        script = f'mkdir -p -- "$(dirname -- "$1")" && head -c {size} > "$1" || exit'
        script += f'; [ ! -f "$1" ] || [ "$(stat -L -c %s -- "$1")" = {size} ] || exit {_CUT}'
        await self._file_command(f"write {path}", script, path, user, content)

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        read = "cat" if max_bytes is None else f"head -c {max_bytes}"
        return await self._file_command(f"read {path}", _READ.format(read=read), path, user, None)

    async def _file_command(
        self, action: str, script: str, path: str, user: str, content: bytes | Path | None
    ) -> bytes:
        # `~` and relative paths start at the user's home.
        home_of = shlex.quote(user) if re.fullmatch("[a-z_][a-z0-9_-]*", user) else ""
        place = f'cd -- "$(eval echo ~{home_of})" 2>/dev/null || cd /; '
        home_path = path.removeprefix("~/") if path.startswith("~/") else path
        if "\0" in path:
            raise CommandFailedError(action, 1, "", "the path contains a NUL byte")
        async with _time_limit(action, _TRANSFER_SECONDS):
            arguments = ["/bin/bash", "-c", place + script, "file", home_path]
            code, data, errors = await self._run(arguments, user, {}, None, content)
        if code == _MISSING:
            raise FileNotFoundError(f"{path} is not in box {self.id}")
        if code == _CUT:
            raise SandboxBusyError(f"{action}: the connection to the Docker daemon ended too early")
        if code != 0:
            if code == _KILLED:
                await self._require_staying()
            words = "it is not a regular file" if code == _NO_FILE else errors.decode(errors="replace").strip()
            raise CommandFailedError(action, 1, "", words)
        return data

    async def _run(
        self,
        arguments: list[str],
        user: str,
        env: Mapping[str, str],
        cwd: str | None,
        content: bytes | Path | None = None,
        on_stderr: Callable[[str], None] | None = None,
    ) -> _ExecOutput:
        """Run a command. Raises CommandFailedError if it cannot start, SandboxBusyError if output was lost."""
        mark = new_mark()
        streams = {1: MarkedStream(mark), 2: MarkedStream(mark)}
        printed = {1: bytearray(), 2: bytearray()}
        try:
            with service_errors(self.id):
                process = await self._container.exec(
                    framed(arguments),
                    stdin=content is not None,
                    user=user,
                    environment={**env, MARK_VARIABLE: mark},
                    workdir=cwd,
                )
                async with process.start() as stream, _sending(stream, content):
                    while any(one.exit_code is None for one in streams.values()):
                        if (message := await stream.read_out()) is None:
                            break
                        number = 1 if message.stream == 1 else 2  # the daemon's own words have another number
                        data = streams[number].feed(message.data)
                        printed[number].extend(data)
                        if number == 2 and data and on_stderr is not None:
                            on_stderr(data.decode(errors="replace"))
                code = streams[1].exit_code
                if code is None or streams[2].exit_code is None:
                    code = await _code_without_mark(process)
        except ConfigError as error:
            raise CommandFailedError(shlex.join(arguments), _CANNOT_START, "", str(error)) from error
        except SandboxBusyError:
            await self._require_staying()  # the daemon ends the streams of a box that it removes
            raise
        return _ExecOutput(code, bytes(printed[1]), bytes(printed[2]))

    async def _require_staying(self) -> None:
        """Raise SandboxGoneError if the box is being removed: the daemon kills its processes before it says so."""
        until = time.monotonic() + _REMOVAL_SECONDS
        while time.monotonic() < until:
            await require_running(self._container)
            await asyncio.sleep(_POLL_MAX_SECONDS / 5)

    async def set_network(self, network: bool) -> None:
        """Take the container's networks away; the way to the adapter needs none."""
        with service_errors(self.id):
            shown = await self._container.show()
            for one in shown["NetworkSettings"]["Networks"].values():
                network_of_box = await self._container.docker.networks.get(one["NetworkID"])
                await network_of_box.disconnect({"Container": self.id, "Force": True})

    async def set_ttl(self, seconds: int) -> None:
        async with _time_limit(f"the time to live of box {self.id}", _ENDING_SECONDS):
            code, _, errors = await self._run(["/bin/sh", "-c", _SET_LIFE, "life", str(seconds)], "root", {}, None)
        if code != 0:
            raise SandboxBusyError(f"box {self.id}'s time to live cannot be set: {errors.decode(errors='replace')}")

    async def kill(self) -> None:
        with contextlib.suppress(SandboxGoneError), service_errors(self.id):
            await remove_container(self._container)


def _login(cmd: str, cwd: str | None) -> list[str]:
    """Return a login shell with the command. It starts at home, unless the image or `cwd` names a directory."""
    return ["/bin/bash", "-l", "-c", cmd if cwd is not None else f'[ "$PWD" != / ] || cd ~ 2>/dev/null\n{cmd}']


async def _code_without_mark(process: Exec) -> int:
    """Return the exit code of a shell that could not start, or died before it wrote the end mark. Raises
    SandboxBusyError if it runs or has ended well: then the daemon has lost the rest of the output."""
    pause = _POLL_SECONDS
    until = time.monotonic() + _REMOVAL_SECONDS  # the daemon reports the end a little later than that of the output
    while (facts := await process.inspect())["Running"] and time.monotonic() < until:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_SECONDS)
    if facts["Running"] or facts["ExitCode"] == 0:
        raise SandboxBusyError("the output of a command ended without its end mark: the connection was cut")
    return int(facts["ExitCode"])


@contextlib.asynccontextmanager
async def _time_limit(action: str, seconds: float | None) -> AsyncIterator[None]:
    """Raise SandboxBusyError if the block takes longer: a connection may hang without ending."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SandboxBusyError(f"{action}: not done after {seconds:.0f} s") from error


@contextlib.asynccontextmanager
async def _sending(stream: Stream, content: bytes | Path | None) -> AsyncIterator[None]:
    """Send the content, if any, while the block runs. The command itself tells if it got too little."""
    if content is None:
        yield
        return
    sending = asyncio.create_task(_send(stream, content))
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(stream: Stream, content: bytes | Path) -> None:
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            await stream.write_in(chunk)
