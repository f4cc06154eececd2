"""The E2B back end, over the unmodified SDK: E2B's cloud, a self-hosted fleet, or the local gateway.

Only the files `e2b*.py` import `e2b`; the SDK's exceptions and settings do not leave them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import structlog

from ratchet.built_images import is_built
from ratchet.errors import (
    CommandFailedError,
    ConfigError,
    SandboxBusyError,
    SandboxGoneError,
    SandboxRefusesError,
    UnknownImageError,
)
from ratchet.vime_names import value_of
from sandboxes.base import BoxLimits, Capabilities, CommandResult, Sandbox, SandboxInfo
from sandboxes.e2b_errors import (
    BOX_REFUSED,
    CONTENT_REFUSED,
    cancellable,
    is_plain_timeout,
    translate,
    translated_errors,
)
from sandboxes.e2b_network import LOOPBACK, hosts_of_agents

if TYPE_CHECKING:
    import httpx
    from e2b import AsyncCommandHandle, AsyncSandbox

_CANNOT_START = 126
_TRANSFER_SECONDS = 600.0
_PROBE_SECONDS = 30.0
_PAGE_SIZE = 100

_log = structlog.get_logger(__name__)

_R = TypeVar("_R")


def image_metadata_key() -> str:
    """Return the metadata key of a task's image, as the environment sets it."""
    return value_of("VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY") or "image"


class E2BProvider:
    """Creates boxes by the SDK. `api_url` and `sandbox_url` None: E2B's cloud.

    `max_connections`: should be twice the number of concurrent commands, because every open command holds a connection
    and all boxes of a service share one address. `template`: `{image}` in it is replaced by the task's image, for
    services that only support templates. `adapter_url`: the adapter as boxes reach it; services other than a gateway on
    this machine are told to let an agent's box reach only this address.
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
    ) -> None:
        _prepare_sdk(max_connections, (api_url, sandbox_url))
        self._image_metadata_key = image_metadata_key
        self._template = template
        self._api_url = api_url
        self._adapter_url = adapter_url
        self._capabilities = Capabilities(
            pause=True, network_policy=True, limits=False, max_ttl_seconds=max_ttl_seconds
        )
        # retries=0: a busy service is the activity's retry policy's business. debug=False: the SDK's debug mode calls
        # no service.
        self._options: dict[str, Any] = {"api_key": api_key, "retries": 0, "debug": False}
        for name, url in (("api_url", api_url), ("sandbox_url", sandbox_url)):
            if url is not None:
                self._options[name] = url.rstrip("/")  # a trailing slash would be doubled in every path

    @property
    def name(self) -> str:
        return "e2b"

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
        limits: BoxLimits | None = None,
    ) -> Sandbox:
        from e2b import ALL_TRAFFIC, AsyncSandbox, SandboxNetworkOpts

        if limits not in (None, BoxLimits()):
            raise ConfigError(
                "sandbox.memory_mib, cpus and max_processes:"
                " this service gives every box what its template or gateway has;"
                " leave them out, or set RATCHET_SANDBOX_PROVIDER=docker"
            )

        hosts = hosts_of_agents(self._api_url, self._adapter_url) if network else None
        with translated_errors("the new box", CONTENT_REFUSED, missing=UnknownImageError):
            box = await AsyncSandbox.create(
                image if is_built(image) else self._template.replace("{image}", image),
                timeout=ttl_seconds,
                metadata={**metadata, self._image_metadata_key: image},
                envs=dict(env or {}),
                allow_internet_access=None if network else False,
                network=None if hosts is None else SandboxNetworkOpts(allow_out=hosts, deny_out=[ALL_TRAFFIC]),
                idempotency_key=idempotency_key,
                **self._options,
            )
        return E2BSandbox(box)

    async def connect(self, sandbox_id: str) -> Sandbox:
        from e2b import AsyncSandbox

        with translated_errors(sandbox_id):
            # Without a timeout the SDK sets 300 seconds, which would extend a box that ends sooner.
            return E2BSandbox(await AsyncSandbox.connect(sandbox_id, timeout=1, **self._options))

    async def kill(self, sandbox_id: str) -> bool:
        from e2b import AsyncSandbox

        with translated_errors(sandbox_id):
            return bool(await AsyncSandbox.kill(sandbox_id, **self._options))

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        with translated_errors(sandbox_id):
            reply = await self._get(f"/sandboxes/{quote(sandbox_id, safe='')}", {})
            if reply.status_code == 404:
                raise SandboxGoneError(f"{sandbox_id}: the service does not know this box")
            found = _info(_body(reply))
        if found.id.partition("-")[0] != sandbox_id.partition("-")[0]:  # E2B appends its machine to a box's name
            raise SandboxBusyError(f"the service was asked about box {sandbox_id} and answers about box {found.id}")
        return found

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        # Quoted twice, as the SDK does.
        query = urlencode({quote(name): quote(value) for name, value in metadata.items()})
        parameters = {"limit": str(_PAGE_SIZE), **({"metadata": query} if query else {})}
        found: list[SandboxInfo] = []
        tokens: set[str] = set()
        token = ""
        with translated_errors("the list of boxes"):
            while token or not tokens:
                tokens.add(token)
                reply = await self._get("/v2/sandboxes", parameters)
                found += [_info(row) for row in _body(reply)]
                token = reply.headers.get("x-next-token", "")
                if token and token in tokens:
                    raise SandboxBusyError(f"the service's list of boxes comes back to its page {token!r} for ever")
                parameters["nextToken"] = token
        return [box for box in found if box.carries(metadata)]

    async def _get(self, path: str, parameters: Mapping[str, str]) -> httpx.Response:
        """Ask the control plane by the SDK's client, whose own calls refuse a row that lacks a field."""
        from e2b.api.client_async import get_api_client
        from e2b.connection_config import ConnectionConfig

        client = get_api_client(ConnectionConfig(**self._options))
        return await client.get_async_httpx_client().get(path, params=parameters)

    async def close(self) -> None:
        """Do nothing: the SDK keeps one connection pool per event loop and closes it with the loop."""


class E2BSandbox:
    """One connected box; the SDK object is kept, so that a command takes one request."""

    def __init__(self, box: AsyncSandbox) -> None:
        self._box = box

    @property
    def id(self) -> str:
        return self._box.sandbox_id

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
        try:
            with cancellable():
                result = await self._confirmed(lambda: self._run(cmd, user, timeout, dict(env or {}), cwd, on_stderr))
        except ConfigError as error:
            result = CommandResult(_CANNOT_START, "", str(error))
        if check and result.exit_code != 0:
            raise CommandFailedError(cmd, result.exit_code, result.stdout, result.stderr)
        return result

    async def _run(
        self,
        cmd: str,
        user: str,
        timeout: float | None,
        env: dict[str, str],
        cwd: str | None,
        on_stderr: Callable[[str], None] | None,
    ) -> CommandResult:
        from e2b import CommandExitException

        started = time.monotonic()
        handle: AsyncCommandHandle[str] | None = None
        try:
            # In the background, because only its handle keeps the output of a command that times out.
            handle = await self._box.commands.run(
                cmd,
                background=True,
                user=user,
                envs=env,
                cwd=cwd,
                timeout=0 if timeout is None else timeout,
                on_stderr=on_stderr,
            )
            ended = await handle.wait()
            result = CommandResult(ended.exit_code, ended.stdout, ended.stderr)
        except CommandExitException as ended_badly:
            result = CommandResult(ended_badly.exit_code, ended_badly.stdout, ended_badly.stderr)
        except Exception as error:
            if timeout is not None and time.monotonic() - started >= timeout and is_plain_timeout(error):
                raise CommandFailedError(cmd, None, *_output(handle), timed_out=True) from error
            raise translate(error, self.id, BOX_REFUSED) from error
        finally:
            if handle is not None:
                await handle.disconnect()
        return result

    async def _confirmed(self, call: Callable[[], Awaitable[_R]]) -> _R:
        """Make a call of the box. If it is refused for what it asks for (ConfigError), make it once more, after the box
        has run another command.

        A proxy on the way refuses with the same statuses as the box, and what it refused must not count as the
        command's or the file's own fault. A refused call has changed nothing.
        """
        try:
            return await call()
        except ConfigError:
            try:
                with translated_errors(self.id, BOX_REFUSED):
                    await self._box.commands.run("true", user="root", timeout=_PROBE_SECONDS)
            except ConfigError as error:
                raise SandboxRefusesError(f"the box refuses every command: {error}") from error
            return await call()

    async def start_detached(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> None:
        async def start() -> None:
            with translated_errors(self.id, BOX_REFUSED):
                handle = await self._box.commands.run(
                    cmd, background=True, user=user, envs=dict(env or {}), cwd=cwd, timeout=0
                )
                await handle.disconnect()

        try:
            await self._confirmed(start)
        except ConfigError as error:
            raise CommandFailedError(cmd, _CANNOT_START, "", str(error)) from error

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        async def write() -> None:
            with translated_errors(self.id, BOX_REFUSED):
                if isinstance(content, Path):
                    with content.open("rb") as stream:
                        await self._box.files.write(path, stream, user=user, request_timeout=_TRANSFER_SECONDS)
                else:
                    await self._box.files.write(path, content, user=user, request_timeout=_TRANSFER_SECONDS)

        try:
            await self._confirmed(write)
        except ConfigError as error:
            raise CommandFailedError(f"write {path}", 1, "", str(error)) from error

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        if max_bytes is None:

            async def read() -> bytes:
                with translated_errors(self.id, BOX_REFUSED):
                    return bytes(
                        await self._box.files.read(path, format="bytes", user=user, request_timeout=_TRANSFER_SECONDS)
                    )

            with _read_errors(path):
                return await self._confirmed(read)
        data = bytearray()
        async with contextlib.aclosing(self._chunks(path, user)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) >= max_bytes:
                    break
        return bytes(data[:max_bytes])

    async def fetch_file(self, path: str, target: Path, *, user: str = "root") -> None:
        async with contextlib.aclosing(self._chunks(path, user)) as chunks:
            with target.open("wb") as file:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)

    async def _chunks(self, path: str, user: str) -> AsyncGenerator[bytes]:
        async def begin() -> Any:
            with translated_errors(self.id, BOX_REFUSED):
                return await self._box.files.read(path, format="stream", user=user)

        with _read_errors(path):
            stream = await self._confirmed(begin)
            with translated_errors(self.id, BOX_REFUSED):
                async with stream:
                    async for chunk in stream:
                        yield chunk

    async def set_ttl(self, seconds: int) -> None:
        with translated_errors(self.id):
            await self._box.set_timeout(seconds)

    async def kill(self) -> None:
        with translated_errors(self.id):
            await self._box.kill()

    async def close(self) -> None:
        """Do nothing: the SDK shares one pool."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()


def _body(reply: httpx.Response) -> Any:
    from e2b.api import handle_api_exception

    if reply.status_code >= 300:
        raise handle_api_exception(reply)
    return reply.json()


def _info(row: Mapping[str, Any]) -> SandboxInfo:
    """Read a row of the control plane. Other services leave out more fields than E2B's own."""
    started_at = datetime.fromisoformat(row["startedAt"]).astimezone(UTC)
    state: Literal["running", "paused"] = "paused" if row.get("state") == "paused" else "running"
    return SandboxInfo(row["sandboxID"], dict(row.get("metadata") or {}), started_at, state)


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
    if hosts & set(LOOPBACK):
        for name in ("NO_PROXY", "no_proxy"):
            known = [host for host in os.environ.get(name, "").split(",") if host]
            os.environ[name] = ",".join([*known, *(host for host in LOOPBACK if host not in known)])


def _output(handle: AsyncCommandHandle[str] | None) -> tuple[str, str]:
    return (handle.stdout, handle.stderr) if handle is not None else ("", "")
