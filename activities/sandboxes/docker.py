"""Boxes as containers of a Docker daemon, over its API.

Why here: the only file that imports `aiodocker`, so its exceptions and settings end here.
Called by: whoever builds the activities passes a `DockerProvider`.

A container's name is the idempotency key: the daemon refuses a second one. Its first process ends it at its time to live, without us.
"""

import asyncio
import contextlib
import re
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.execs import Exec
from aiodocker.stream import Stream

from activities.sandboxes.base import Capabilities, CommandResult, Sandbox, SandboxInfo
from ratchet.errors import CommandFailedError, ConfigError, RatchetError, SandboxBusyError, SandboxGoneError

_CANNOT_START, _KILLED, _MISSING, _NO_FILE, _CUT = 126, 137, 144, 145, 146
_POLL_SECONDS, _POLL_MAX_SECONDS = 0.01, 0.5
_CHUNK_BYTES = 1 << 18
_TRANSFER_SECONDS = 600.0
_REMOVAL_SECONDS, _MAKING_SECONDS = 3.0, 20.0
_CAPABILITIES_KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_DEADLINE = "/run/ratchet-deadline"
# /proc/uptime is the host's clock since boot: nobody in the box can set it.
_LIFE = f"""
now() {{ read -r up _ </proc/uptime; up=${{up%%.*}}; }}
now; mkdir -p /run; umask 077; echo $((up + $1)) >{_DEADLINE}
while now; read -r end <{_DEADLINE} && [ "$up" -lt "$end" ]; do sleep 1; done
"""
_SET_LIFE = f"read -r up _ </proc/uptime; umask 077; echo $((${{up%%.*}} + $1)) >{_DEADLINE}.new && mv {_DEADLINE}.new {_DEADLINE}"
_READ = f'[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING}; [ -f "$1" ] || exit {_NO_FILE}; exec {{read}} -- "$1"'
_CANNOT_START_WORDS = ("unable to find user", "no matching entries", "OCI runtime exec failed", "chdir")
_LIVE_STATES = ("created", "running", "paused", "restarting")


class DockerProvider:
    """`url` None: DOCKER_HOST, else the local socket. Images are the daemon's own: nothing is pulled during a create.

    Boxes share the bridge `network`, which is made if missing: internal, so that nothing beyond this machine is reached, and without
    traffic between boxes. The adapter has to listen on its gateway address, and what else listens there is reachable, too.
    """

    def __init__(
        self,
        url: str | None = None,
        network: str = "ratchet-boxes",
        memory_bytes: int = 2 << 30,
        max_processes: int = 512,
        num_cpus: float | None = None,
        max_ttl_seconds: int = 86_400,
    ) -> None:
        self._url, self._network = url, network
        self._limits: dict[str, Any] = {"Memory": memory_bytes, "MemorySwap": memory_bytes, "PidsLimit": max_processes}
        if num_cpus is not None:
            self._limits["NanoCpus"] = int(num_cpus * 1e9)
        self._capabilities = Capabilities(pause=False, network_policy=True, limits=True, max_ttl_seconds=max_ttl_seconds)
        self._client: aiodocker.Docker | None = None
        self._making_network = asyncio.Lock()

    @property
    def name(self) -> str:
        return "docker"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        env: Mapping[str, str] | None = None,
        network: bool = True,
    ) -> Sandbox:
        name = f"ratchet-{idempotency_key}"
        with _service_errors(f"the new box of image {image}", missing=ConfigError):
            if network:
                async with self._making_network:  # the daemon would make two of one name
                    await self._ensure_network()
            config = self._config(image, ttl_seconds, metadata, env or {}, network)
            try:
                container = await self._docker().containers.create(config, name=name)
            except DockerError as error:
                if error.status != 409:
                    raise
                container = await self._being_made(name)
            await container.start()  # which is nothing where it runs already
        return DockerSandbox(container)

    async def _being_made(self, name: str) -> DockerContainer:
        """The daemon takes the name some time before it shows the container."""
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return await self._docker().containers.get(name)
            except DockerError as error:
                if error.status != 404 or time.monotonic() > until:
                    raise
            await asyncio.sleep(_POLL_MAX_SECONDS / 5)

    def _config(self, image: str, ttl_seconds: int, metadata: Mapping[str, str], env: Mapping[str, str], network: bool) -> dict[str, Any]:
        return {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", _LIFE, "life"],
            "Cmd": [str(ttl_seconds)],
            "User": "root",
            "Hostname": "box",
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": dict(metadata),
            "HostConfig": {
                **self._limits,
                "AutoRemove": True,
                "Init": True,
                "NetworkMode": self._network if network else "none",
                "CapDrop": ["ALL"],
                "CapAdd": list(_CAPABILITIES_KEPT),
                "SecurityOpt": ["no-new-privileges"],
            },
        }

    async def connect(self, sandbox_id: str) -> Sandbox:
        with _service_errors(sandbox_id):
            container = await self._docker().containers.get(sandbox_id)
        await _require_running(container)
        return DockerSandbox(container)

    async def kill(self, sandbox_id: str) -> bool:
        try:
            with _service_errors(sandbox_id):
                await _remove(self._docker().containers.container(sandbox_id))
        except SandboxGoneError:
            return False
        return True

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        labels = [f"{name}={value}" for name, value in metadata.items()]
        with _service_errors("the list of boxes"):
            found = await self._docker().containers.list(all=True, filters={"label": labels, "status": list(_LIVE_STATES)})
        return [
            SandboxInfo(
                container.id,
                dict(container["Labels"]),
                datetime.fromtimestamp(container["Created"], UTC),
                "paused" if container["State"] == "paused" else "running",
            )
            for container in found
            if any(name.startswith("/ratchet-") for name in container["Names"])
        ]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _docker(self) -> aiodocker.Docker:
        """Made with the first call, because it belongs to the event loop that runs then."""
        if self._client is None:
            self._client = aiodocker.Docker(url=self._url)
        return self._client

    async def _ensure_network(self) -> None:
        try:
            await (await self._docker().networks.get(self._network)).show()
        except DockerError as error:
            if error.status != 404:
                raise
            options = {"com.docker.network.bridge.enable_icc": "false"}
            try:
                await self._docker().networks.create(
                    {"Name": self._network, "CheckDuplicate": True, "Driver": "bridge", "Internal": True, "Options": options}
                )
            except DockerError as refused:
                if refused.status != 409:  # another worker was first
                    raise


class DockerSandbox:
    """One container; commands are execs in it."""

    def __init__(self, container: DockerContainer) -> None:
        self._container = container

    @property
    def id(self) -> str:
        return self._container.id

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
        arguments = _login(cmd, cwd)
        if timeout is not None:
            # In the box, because the API cannot end an exec; KILL reaches the whole process group.
            arguments = ["timeout", "-s", "KILL", f"{timeout:.3f}", *arguments]
        started = time.monotonic()
        try:
            code, stdout, stderr = await self._run(arguments, user, env or {}, cwd)
        except CommandFailedError as unable:
            code, stdout, stderr = _CANNOT_START, b"", unable.stderr.encode()
        result = CommandResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if code == _KILLED:
            if timeout is not None and time.monotonic() - started >= timeout:
                await _require_running(self._container)
                raise CommandFailedError(cmd, None, result.stdout, result.stderr, timed_out=True)
            await self._require_staying()
        if check and code != 0:
            raise CommandFailedError(cmd, code, result.stdout, result.stderr)
        return result

    async def start_detached(self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        try:
            with _service_errors(self.id):
                process = await self._container.exec(
                    _login(cmd, cwd), stdout=False, stderr=False, user=user, environment=dict(env or {}), workdir=cwd
                )
                await process.start(detach=True)
        except ConfigError as error:
            raise CommandFailedError(cmd, _CANNOT_START, "", str(error)) from error

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        if isinstance(content, Path):
            size = (await asyncio.to_thread(content.stat)).st_size
        else:
            content = content.encode() if isinstance(content, str) else content
            size = len(content)
        # Reads as many bytes as there are: the API cannot close one direction of a stream.
        script = f'mkdir -p -- "$(dirname -- "$1")" && head -c {size} > "$1" || exit'
        script += f'; [ ! -f "$1" ] || [ "$(stat -L -c %s -- "$1")" = {size} ] || exit {_CUT}'
        await self._file_command(f"write {path}", script, path, user, content)

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        read = "cat" if max_bytes is None else f"head -c {max_bytes}"
        return await self._file_command(f"read {path}", _READ.format(read=read), path, user, None)

    async def fetch_file(self, path: str, target: Path, *, user: str = "root") -> None:
        with target.open("wb") as file:
            await self._file_command(f"read {path}", _READ.format(read="cat"), path, user, None, into=file)

    async def _file_command(
        self, action: str, script: str, path: str, user: str, content: bytes | Path | None, into: BinaryIO | None = None
    ) -> bytes:
        # `~` and relative paths start at the user's home.
        place = f'cd -- "$(eval echo ~{shlex.quote(user) if re.fullmatch("[a-z_][a-z0-9_-]*", user) else ""})" 2>/dev/null || cd /; '
        home_path = path.removeprefix("~/") if path.startswith("~/") else path
        if "\0" in path:
            raise CommandFailedError(action, 1, "", "the path contains a NUL byte")
        async with asyncio.timeout(_TRANSFER_SECONDS):
            code, data, errors = await self._run(["/bin/bash", "-c", place + script, "file", home_path], user, {}, None, content, into)
        if code == _MISSING:
            raise FileNotFoundError(f"{path} is not in box {self.id}")
        if code == _CUT:
            raise SandboxBusyError(f"{action}: the connection to the Docker daemon ended too early")
        if code != 0:
            if code == _KILLED:
                await self._require_staying()
            words = "it is no regular file" if code == _NO_FILE else errors.decode(errors="replace").strip()
            raise CommandFailedError(action, 1, "", words)
        return data

    async def _run(
        self,
        arguments: list[str],
        user: str,
        env: Mapping[str, str],
        cwd: str | None,
        content: bytes | Path | None = None,
        into: BinaryIO | None = None,
    ) -> tuple[int, bytes, bytes]:
        """Exit code and output, which goes to `into` instead if that is given. Raises CommandFailedError for a command that cannot start."""
        try:
            with _service_errors(self.id):
                process = await self._container.exec(arguments, stdin=content is not None, user=user, environment=dict(env), workdir=cwd)
                async with process.start() as stream:
                    sending = asyncio.create_task(_send(stream, content)) if content is not None else None
                    stdout, stderr = bytearray(), bytearray()
                    while (message := await stream.read_out()) is not None:
                        if message.stream == 1 and into is not None:
                            await asyncio.to_thread(into.write, message.data)
                        else:
                            (stdout if message.stream == 1 else stderr).extend(message.data)
                    if sending is not None:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
                code = await _exit_code(process)
        except ConfigError as error:
            raise CommandFailedError(shlex.join(arguments), _CANNOT_START, "", str(error)) from error
        return code, bytes(stdout), bytes(stderr)

    async def _require_staying(self) -> None:
        """Of a box whose command was killed: the daemon kills the processes of one that it removes some time before it says so."""
        until = time.monotonic() + _REMOVAL_SECONDS
        while time.monotonic() < until:
            await _require_running(self._container)
            await asyncio.sleep(_POLL_MAX_SECONDS / 5)

    async def set_ttl(self, seconds: int) -> None:
        code, _, errors = await self._run(["/bin/sh", "-c", _SET_LIFE, "life", str(seconds)], "root", {}, None)
        if code != 0:
            raise SandboxBusyError(f"the time to live of box {self.id} cannot be set: {errors.decode(errors='replace')}")

    async def kill(self) -> None:
        with contextlib.suppress(SandboxGoneError), _service_errors(self.id):
            await _remove(self._container)

    async def close(self) -> None:
        """The provider holds the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.kill()


def _login(cmd: str, cwd: str | None) -> list[str]:
    """Docker starts where the image says, which is often the root directory; a login starts at home."""
    return ["/bin/bash", "-l", "-c", cmd if cwd is not None else f'[ "$PWD" != / ] || cd ~ 2>/dev/null\n{cmd}']


async def _exit_code(process: Exec) -> int:
    """A command may close its output before it ends, and the daemon hears of the end a little later than of the output's."""
    pause = _POLL_SECONDS
    while (facts := await process.inspect())["Running"]:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_SECONDS)
    return int(facts["ExitCode"])


async def _send(stream: Stream, content: bytes | Path) -> None:
    async for chunk in _chunks(content):
        await stream.write_in(chunk)


async def _chunks(content: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]
        return
    with content.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


async def _remove(container: DockerContainer) -> None:
    """One that is being removed already is on its way; a missing one raises."""
    try:
        await container.delete(force=True)
    except DockerError as error:
        if error.status != 409:
            raise


async def _require_running(container: DockerContainer) -> None:
    with _service_errors(container.id):
        facts = await container.show()
    if not facts["State"]["Running"]:
        raise SandboxGoneError(f"box {container.id} does not run any more")


@contextmanager
def _service_errors(subject: str, missing: type[RatchetError] = SandboxGoneError) -> Iterator[None]:
    try:
        yield
    except DockerError as error:
        raise _translate(error, subject, missing) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SandboxBusyError(f"the Docker daemon cannot be reached for {subject}: {error or type(error).__name__}") from error


def _translate(error: DockerError, subject: str, missing: type[RatchetError]) -> RatchetError:
    """The one table from the daemon's answers to our errors."""
    words = f"{subject}: {error.message}"
    if any(part in error.message for part in _CANNOT_START_WORDS):
        return ConfigError(f"Docker refuses {words}")
    if error.status == 404:
        return missing(words)
    if error.status == 409 and ("not running" in error.message or "removal" in error.message):
        return SandboxGoneError(words)
    if error.status in (400, 403):
        return ConfigError(f"Docker refuses {words}")
    return SandboxBusyError(words)
