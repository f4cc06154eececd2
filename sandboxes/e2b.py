"""The E2B back end, over the unmodified SDK: E2B's cloud, a self-hosted fleet, or the local gateway. Only the files
`e2b*.py` import `e2b`; the SDK's exceptions and settings do not leave them."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import structlog

from ratchet.built_images import is_built
from ratchet.errors import (
    CommandFailedError,
    ConfigError,
    SandboxBusyError,
    SandboxFullError,
    SandboxGoneError,
    SandboxRefusesError,
)
from ratchet.vime_names import value_of
from sandboxes.base import OPEN_NETWORK, BoxLimits, Capabilities, Command, CommandResult, Network, Sandbox, SandboxInfo
from sandboxes.e2b_control_plane import ControlPlane
from sandboxes.e2b_errors import BOX_REFUSED, FILE_REFUSED, cancellable, is_plain_timeout, translate, translated_errors

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

_CANNOT_START = 126
_TRANSFER_SECONDS = 600.0
_PROBE_SECONDS = 30.0
_CONNECT_SECONDS = 3600
"""Time to live that `connect` asks for if the service tells no end of a box; it has to be longer than a stage needs
before it renews it."""
_MAX_READ_BYTES = 1 << 30
_LOOPBACK = ("127.0.0.1", "localhost")
_KEY_METADATA = "ratchet_key"
"""Metadata key of the idempotency key, by which a box is found if the service does not honour such keys."""

_log = structlog.get_logger(__name__)

_R = TypeVar("_R")


def image_metadata_key() -> str:
    """Return the metadata key of a task's image, as the environment sets it."""
    return value_of("VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY") or "image"


class E2BProvider:
    """Creates boxes of the service at `api_url` and `sandbox_url`; None: that of the SDK's own variables.

    `max_connections`: should be twice the number of concurrent commands, because every open command holds a connection
    and all boxes of a service share one address. `template`: `{image}` in it is replaced by the task's image, for
    services that only support templates. `adapter_url`: the adapter as boxes reach it; the service is told to let an
    agent's box reach only this host. `open_network`: the user accepts that the service does not obey.
    """

    def __init__(
        self,
        api_key: str,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        image_metadata_key: str = "image",
        template: str = "base",
        max_connections: int = 1000,
        max_ttl_seconds: int = 86_400,
        adapter_url: str = "",
        open_network: bool = False,
    ) -> None:
        if os.environ.get("E2B_DEBUG", "").lower() == "true":
            raise ConfigError(
                "E2B_DEBUG=true: the SDK then makes no boxes and runs everything in one, so that an agent would see how"
                " it is graded; unset it, and set E2B_API_URL and E2B_SANDBOX_URL to reach a service on this machine"
            )
        _prepare_sdk(max_connections, (api_url, sandbox_url))
        self._image_metadata_key = image_metadata_key
        self._template = template
        self._adapter_host = urlsplit(adapter_url).hostname
        self.name = "e2b"
        self.capabilities = Capabilities(
            pause=True,
            network_policy=not open_network,
            limits=False,
            max_ttl_seconds=max_ttl_seconds,
            without=(OPEN_NETWORK,) if open_network else (),
        )
        # retries=0: a busy service is the activity's retry policy's business.
        self._options: dict[str, Any] = {"api_key": api_key, "retries": 0}
        for name, url in (("api_url", api_url), ("sandbox_url", sandbox_url)):
            if url:
                self._options[name] = url.rstrip("/")  # a trailing slash would be doubled in every path
        self._plane = ControlPlane(self._options)

    @property
    def url(self) -> str:
        """The service's address, as the SDK finds it in its variables."""
        return self._plane.url

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        network: Network = True,
        limits: BoxLimits | None = None,
    ) -> E2BSandbox:
        if limits not in (None, BoxLimits()):
            raise ConfigError(
                "sandbox.memory_mib, cpus and max_processes:"
                " this service gives every box what its template or gateway has;"
                " leave them out, or set RATCHET_SANDBOX_PROVIDER=docker"
            )
        if not await self._plane.is_own_gateway():  # another service may know no such keys
            for found in await self.list({_KEY_METADATA: idempotency_key}):
                return await self.connect(found.id)
        body = {
            "templateID": image if is_built(image) else self._template.replace("{image}", image),
            "timeout": ttl_seconds,
            "metadata": {**metadata, self._image_metadata_key: image, _KEY_METADATA: idempotency_key},
            **self._policy(network),
        }
        return self._box(await self._plane.create(body, idempotency_key, image))

    def _policy(self, network: Network) -> dict[str, Any]:
        from e2b import ALL_TRAFFIC

        if network is not True:
            return {"allow_internet_access": network is not False}
        return {"network": {"allowOut": [self._adapter_host] if self._adapter_host else [], "denyOut": [ALL_TRAFFIC]}}

    async def connect(self, sandbox_id: str) -> E2BSandbox:
        row = await self._plane.row(sandbox_id)
        info = self._info(row)
        if info.state == "paused" or not row.get("envdAccessToken"):
            left = info.ends_at - datetime.now(UTC) if info.ends_at else timedelta(seconds=_CONNECT_SECONDS)
            row = await self._plane.connect(sandbox_id, max(1, math.ceil(left.total_seconds())))
        return self._box(row)

    async def kill(self, sandbox_id: str) -> bool:
        return await _kill(self._plane, sandbox_id)

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        return self._info(await self._plane.row(sandbox_id))

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        found = [self._info(row) for row in await self._plane.rows(metadata)]
        return [box for box in found if box.carries(metadata)]

    def _info(self, row: Mapping[str, Any]) -> SandboxInfo:
        """Read a row of the control plane. Other services leave out more fields than E2B's own."""
        moments: list[datetime | None] = []
        for name in ("startedAt", "endAt"):
            try:
                moments.append(datetime.fromisoformat(row[name]).astimezone(UTC) if row.get(name) else None)
            except ValueError as error:
                raise SandboxRefusesError(f"`{name}` of box {row['sandboxID']} of {self.url}: {error}") from error
        started_at, ends_at = moments
        if started_at is None:
            raise self._plane.lacks("startedAt", f"{self.url} about box {row['sandboxID']}")
        state: Literal["running", "paused"] = "paused" if row.get("state") == "paused" else "running"
        return SandboxInfo(row["sandboxID"], dict(row.get("metadata") or {}), started_at, state, ends_at)

    def _box(self, row: Mapping[str, Any]) -> E2BSandbox:
        """Return a handle, as the SDK makes one of the answer to its own create call."""
        from e2b import AsyncSandbox
        from e2b.connection_config import ConnectionConfig
        from packaging.version import Version

        if not row.get("envdVersion"):
            raise self._plane.lacks("envdVersion", f"{self.url} about box {row['sandboxID']}")
        token = row.get("envdAccessToken")
        headers = {"E2b-Sandbox-Id": row["sandboxID"], "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        box = AsyncSandbox(
            sandbox_id=row["sandboxID"],
            sandbox_domain=row.get("domain"),
            envd_version=Version(row["envdVersion"]),
            envd_access_token=token,
            traffic_access_token=row.get("trafficAccessToken"),
            connection_config=ConnectionConfig(
                extra_sandbox_headers=headers | ({"X-Access-Token": token} if token else {}), **self._options
            ),
        )
        return E2BSandbox(box, self._plane, self._policy)

    async def close(self) -> None:
        """Do nothing: the SDK keeps one connection pool per event loop and closes it with the loop."""


class E2BSandbox(Sandbox):
    """One connected box; the SDK object is kept, so that a command takes one request."""

    def __init__(self, box: AsyncSandbox, plane: ControlPlane, policy: Callable[[Network], dict[str, Any]]) -> None:
        self.sdk = box
        self._plane = plane
        self._policy = policy

    @property
    def id(self) -> str:
        return self.sdk.sandbox_id

    async def run(self, command: Command) -> CommandResult:
        try:
            with cancellable():
                return await self._confirmed(lambda: self._run(command))
        except ConfigError as error:
            return CommandResult(_CANNOT_START, "", str(error))

    async def _run(self, command: Command) -> CommandResult:
        from e2b import CommandExitException

        started = time.monotonic()
        handle: AsyncCommandHandle[str] | None = None
        try:
            # In the background, because only its handle keeps the output of a command that times out.
            handle = await self.sdk.commands.run(
                command.cmd,
                background=True,
                user=command.user,
                envs=dict(command.env),
                cwd=command.cwd or "~",  # without one, envd starts in the home of another user
                timeout=command.timeout or 0,
                on_stderr=command.on_stderr,
            )
            ended = await handle.wait()
            result = CommandResult(ended.exit_code, ended.stdout, ended.stderr)
        except CommandExitException as ended_badly:
            result = CommandResult(ended_badly.exit_code, ended_badly.stdout, ended_badly.stderr)
        except Exception as error:
            timed_out = command.timeout is not None and time.monotonic() - started >= command.timeout
            if timed_out and is_plain_timeout(error):
                await self._require_running()
                output = (handle.stdout, handle.stderr) if handle is not None else ("", "")
                raise CommandFailedError(command.cmd, None, *output, timed_out=True) from error
            raise translate(error, self.id, BOX_REFUSED) from error
        finally:
            if handle is not None:
                await handle.disconnect()
        return result

    async def _confirmed(self, call: Callable[[], Awaitable[_R]]) -> _R:
        """Make a call of the box. If it is refused for what it asks for (ConfigError), make it once more, after the box
        has run another command.

        A proxy on the way refuses with the same statuses as the box, and what it refused must not count as the
        command's or the file's own fault. A refused call has changed nothing. Of any other failure the service is asked
        if the box lives.
        """
        try:
            try:
                return await call()
            except ConfigError:
                try:
                    with translated_errors(self.id, BOX_REFUSED):
                        await self.sdk.commands.run("true", user="root", timeout=_PROBE_SECONDS)
                except ConfigError as error:
                    raise SandboxRefusesError(f"the box refuses every command: {error}") from error
                return await call()
        except SandboxBusyError as error:
            if not isinstance(error, SandboxFullError):
                await self._require_running()
            raise

    async def _require_running(self) -> None:
        """Raise SandboxGoneError, or SandboxBusyError for a paused box, as far as the service can say it."""
        try:
            row = await self._plane.row(self.id)
        except SandboxBusyError:
            return
        if row.get("state") == "paused":
            raise SandboxBusyError(f"box {self.id} is paused; the next call of `connect` resumes it")

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        async def write() -> None:
            with translated_errors(self.id, FILE_REFUSED), contextlib.ExitStack() as stack:
                data = stack.enter_context(content.open("rb")) if isinstance(content, Path) else content
                # As an octet stream, because a form cannot carry every file name.
                await self.sdk.files.write(
                    path, data, user=user, use_octet_stream=True, request_timeout=_TRANSFER_SECONDS
                )

        try:
            await self._confirmed(write)
        except ConfigError as error:
            raise CommandFailedError(f"write {path}", 1, "", str(error)) from error

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        async def begin() -> Any:
            with translated_errors(self.id, FILE_REFUSED):
                # Some services read a pipe or a device without end.
                if (await self.sdk.files.get_info(path, user=user)).type is not FileType.FILE:
                    raise ConfigError(f"{path} is not a regular file")
                return await self.sdk.files.read(path, format="stream", user=user)

        from e2b import FileType

        data = bytearray()
        with _read_errors(path):
            stream = await self._confirmed(begin)
            with translated_errors(self.id, FILE_REFUSED):
                async with stream:
                    async for chunk in stream:
                        data += chunk
                        if len(data) > (_MAX_READ_BYTES if max_bytes is None else max_bytes):
                            break
        if max_bytes is None and len(data) > _MAX_READ_BYTES:
            raise CommandFailedError(f"read {path}", 1, "", f"it has more than {_MAX_READ_BYTES} bytes")
        return bytes(data[:max_bytes])

    async def set_network(self, network: bool) -> None:
        policy = self._policy(network)
        try:
            await self._plane.ask("PUT", self.id, "/network", json=policy.get("network", policy))
        except (SandboxGoneError, SandboxRefusesError) as error:
            if (await self._plane.row(self.id)).get("state") == "paused":
                raise
            raise SandboxRefusesError(
                f"{error}: PUT {self._plane.url}/sandboxes/{self.id}/network does not close the network of this living "
                "box, as `sandbox.network: pre_commands` needs: leave that out of the run and its tasks, or use a "
                "service that has this route"
            ) from error

    async def set_ttl(self, seconds: int) -> None:
        await self._plane.ask("POST", self.id, "/timeout", json={"timeout": seconds})

    async def kill(self) -> None:
        await _kill(self._plane, self.id)


async def _kill(plane: ControlPlane, box_id: str) -> bool:
    try:
        await plane.ask("DELETE", box_id)
    except SandboxGoneError:
        return False
    return True


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """Translate a refused path: it is a missing file or a failed command, not a wrong configuration."""
    from e2b import FileNotFoundException

    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundException):
            raise FileNotFoundError(f"read {path}: {error}") from error
        raise CommandFailedError(f"read {path}", 1, "", str(error)) from error


def _prepare_sdk(max_connections: int, urls: tuple[str | None, ...]) -> None:
    """Set what the SDK reads only from the environment.

    That is the size of its pool, read once at import, and the proxy exceptions, without which it uses a proxy for
    loopback.
    """
    if "e2b" not in sys.modules:
        os.environ["E2B_MAX_CONNECTIONS"] = str(max_connections)
    elif int(os.environ.get("E2B_MAX_CONNECTIONS") or 200) < max_connections:
        _log.warning(
            "e2b_imported_too_early",
            wanted_connections=max_connections,
            remedy="set E2B_MAX_CONNECTIONS in the environment",
        )
    hosts = {urlsplit(url).hostname for url in urls if url}
    if hosts & set(_LOOPBACK):
        for name in ("NO_PROXY", "no_proxy"):
            known = [host for host in os.environ.get(name, "").split(",") if host]
            os.environ[name] = ",".join([*known, *(host for host in _LOOPBACK if host not in known)])
