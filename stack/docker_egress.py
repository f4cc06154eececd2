"""The only network path out of a container in which an agent works: 127.0.0.1 and the adapter's port inside, spliced
to the adapter outside.

The listener is opened inside the box's network namespace and served from outside, so a box needs no network of its own
and can reach nothing else: no other port of this machine, no other box and no internet, regardless of packet filters.
The process keeps no state: after a restart it finds the living boxes again, and the agents' clients retry.
"""

import asyncio
import contextlib
import json
import os
import socket
from functools import partial
from pathlib import Path

import aiodocker
import aiohttp
import structlog
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from ratchet.errors import MachineError
from sandbox_gateway.boxd import linux_calls
from sandboxes.docker_settings import EGRESS_LABEL

_LOOK_SECONDS, _AGAIN_SECONDS = 2.0, 1.0
_ANSWER_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_BACKLOG = 64
_EVENTS = {"type": ["container"], "event": ["start", "die"]}

_log = structlog.get_logger(__name__)


async def require_docker_egress() -> None:
    """Raise MachineError if the daemon at DOCKER_HOST cannot run boxes, or they cannot reach the adapter."""
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
            f"RATCHET_SANDBOX_PROVIDER=docker: no daemon answers at {where} (DOCKER_HOST): "
            f"{error or type(error).__name__}"
        ) from None


class DockerEgress:
    """Serve the boxes whose label names `adapter`; other containers of the same daemon belong to other stacks."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        host, _, port = adapter.rpartition(":")
        self._host = host
        self._port = int(port)
        self._servers: dict[str, asyncio.Server] = {}

    async def run(self) -> None:
        """Serve until cancelled. If the daemon is unreachable, try again."""
        while True:
            try:
                async with aiodocker.Docker() as docker:
                    await self._follow(docker)
            except (DockerError, aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no socket yet
                _log.warning("docker_away", reason=str(error) or type(error).__name__)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self, docker: aiodocker.Docker) -> None:
        """Scan containers periodically and after events, which may be missed. Returns when the event stream ends."""
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
            except (DockerError, OSError) as error:  # the container is ending; the next scan decides
                _log.warning("no_way_for_box", box=box_id[:12], reason=str(error))

    async def _open(self, box: DockerContainer) -> asyncio.Server:
        facts = await box.show()
        listener = _listen_inside(facts["State"]["Pid"], box.id, self._port)
        return await asyncio.start_server(self._carry, sock=listener, backlog=_BACKLOG)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            answers, asks = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(asks):
                # the first copy that fails closes both
                await asyncio.gather(_copy(reader, asks), _copy(answers, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.write_eof()


def _listen_inside(pid: int, box_id: str, port: int) -> socket.socket:
    """Open the listener, then check its namespace: the pid may have been reused since the daemon reported it."""
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if box_id not in Path(f"/proc/{pid}/cgroup").read_text():
            raise OSError(
                f"process {pid} of the box is not on this machine; "
                "run `ratchet part egress` on the machine of the Docker daemon"
            )
        listen = partial(socket.create_server, ("127.0.0.1", port), backlog=_BACKLOG)
        return linux_calls.within(theirs, linux_calls.CLONE_NEWNET, listen)
    finally:
        os.close(theirs)
