"""The only way out of a container that an agent works in: 127.0.0.1 and the adapter's port inside, spliced to the adapter outside.

Why here: the listener is opened inside the box's network namespace and served from outside it, so a box needs no network, and there is
nothing else that it could reach: not this machine's other ports, no other box, no internet, whatever packet filters say.
Called by: `ratchet egress`, which runs beside the Docker daemon; `ratchet up` asks `require_docker_egress` first.

Holds nothing that matters: after a restart the boxes that live are found again, and their agents' clients call once more.
"""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import aiodocker
import aiohttp
import structlog
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from activities.sandboxes.docker_settings import EGRESS_LABEL
from ratchet.errors import MachineError
from sandbox_gateway.boxd import linux_calls

_LOOK_SECONDS, _AGAIN_SECONDS = 2.0, 1.0
_ANSWER_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_BACKLOG = 64
_EVENTS = {"type": ["container"], "event": ["start", "die"]}

_log = structlog.get_logger(__name__)


async def require_docker_egress() -> None:
    """Raises MachineError where boxes cannot be containers of the daemon that DOCKER_HOST names, or not with a way to the adapter."""
    if os.geteuid() != 0:
        raise MachineError(
            "RATCHET_SANDBOX_PROVIDER=docker: opening the adapter's port in a box needs root;"
            " become root, or name a network that reaches the adapter in RATCHET_DOCKER_NETWORK"
        )
    try:
        async with asyncio.timeout(_ANSWER_SECONDS), aiodocker.Docker() as docker:
            await docker.version()
    except (aiohttp.ClientError, DockerError, ValueError, OSError) as error:
        where = os.environ.get("DOCKER_HOST") or "the local socket"
        raise MachineError(
            f"RATCHET_SANDBOX_PROVIDER=docker: no daemon answers at {where} (DOCKER_HOST): {error or type(error).__name__}"
        ) from None


class DockerEgress:
    """Serves the boxes whose label names `adapter`; others on the same daemon are somebody else's."""

    def __init__(self, adapter: str, url: str | None = None) -> None:
        self._adapter, self._url = adapter, url
        host, _, port = adapter.rpartition(":")
        self._host, self._port = host, int(port)
        self._servers: dict[str, asyncio.Server] = {}

    async def run(self) -> None:
        """For ever; a daemon that is away is asked again."""
        while True:
            try:
                async with aiodocker.Docker(self._url) as docker:
                    await self._follow(docker)
            except (
                DockerError,
                aiohttp.ClientError,
                OSError,
                ValueError,
            ) as error:  # ValueError: there is no socket yet
                _log.warning("docker_away", reason=str(error) or type(error).__name__)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self, docker: aiodocker.Docker) -> None:
        """News only make it look sooner: what is missed is found with the next look. Returns when the daemon ends the news."""
        news = docker.events.subscribe(filters=json.dumps(_EVENTS))  # type: ignore[no-untyped-call]
        while True:
            await self._look(docker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    if await news.get() is None:
                        return

    async def _look(self, docker: aiodocker.Docker) -> None:
        filters = {"label": [f"{EGRESS_LABEL}={self._adapter}"], "status": ["running", "paused"]}
        boxes = {box.id: box for box in await docker.containers.list(filters=filters)}
        for gone in self._servers.keys() - boxes.keys():
            self._servers.pop(gone).close()
        for box_id in boxes.keys() - self._servers.keys():
            try:
                self._servers[box_id] = await self._open(boxes[box_id])
            except (DockerError, OSError) as error:  # one that ends just now, or the next look succeeds
                _log.warning("no_way_for_box", box=box_id[:12], reason=str(error))

    async def _open(self, box: DockerContainer) -> asyncio.Server:
        facts = await box.show()
        listener = _listen_inside(facts["State"]["Pid"], box.id, self._port)
        return await asyncio.start_server(self._carry, sock=listener, backlog=_BACKLOG)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            answers, asks = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(asks):
                await asyncio.gather(_copy(reader, asks), _copy(answers, writer))  # the first that fails closes both


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.write_eof()


def _listen_inside(pid: int, box_id: str, port: int) -> socket.socket:
    """Opened before it is checked whose namespace it is: the pid may have become another's since the daemon named it."""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if box_id not in Path(f"/proc/{pid}/cgroup").read_text():
            raise OSError(
                f"process {pid} of the box is not on this machine; `ratchet egress` has to run where the Docker daemon runs"
            )
        linux_calls.setns(theirs, linux_calls.CLONE_NEWNET)
        try:
            return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        finally:
            linux_calls.setns(ours, linux_calls.CLONE_NEWNET)
    finally:
        os.close(ours)
        os.close(theirs)
