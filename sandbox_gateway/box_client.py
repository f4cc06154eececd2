"""Access to one box: its record on disk, calls to its boxd. No state is in memory only: gateways get killed."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from sandbox_gateway.boxd.protocol import CONTROL_SOCKET, FILES_SOCKET, BoxFaultError, JsonMessage, encode_line
from sandbox_gateway.wire_errors import BoxNotFoundError

RECORD_FILE = "box.json"
_MAX_FDS = 4
_CALL_SECONDS = 60.0


class BoxRecord(BaseModel):
    """The content of box.json. `spec` is boxd's part and never changes; the gateway writes the rest."""

    model_config = ConfigDict(frozen=True)

    id: str
    template: str
    token: str
    slot: int
    metadata: dict[str, str]
    idempotency_key: str | None
    started_at: float
    deadline: float
    state: Literal["running", "paused"] = "running"
    memory_bytes: int
    spec: dict[str, Any]


class BoxStream:
    """A control connection to one process: pid, spool file, and updates of the file's size and the process's end."""

    def __init__(self, connection: socket.socket, head: JsonMessage, spool: int) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self.pid = int(head["pid"])
        self.size = int(head["size"])
        self.end = head["end"]
        self.spool = spool

    async def wait_for_news(self, timeout_seconds: float) -> None:
        """Update `size` and `end`. Raises TimeoutError, or ConnectionError if boxd has ended."""
        async with asyncio.timeout(timeout_seconds):
            while b"\n" not in self._buffer:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 65_536)
                if not data:
                    raise ConnectionError("boxd closed the stream")
                self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            news = json.loads(line)
            self.size = max(self.size, news["size"])
            self.end = news["end"] or self.end

    def close(self) -> None:
        self._socket.close()
        os.close(self.spool)


class BoxClient:
    def __init__(self, directory: Path, record: BoxRecord) -> None:
        self.directory = directory
        self.record = record
        # Socket paths are limited to 108 bytes; through an fd of the directory they are always short enough.
        self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.boxd_fd: int | None = None
        """The pidfd of boxd; set once boxd runs."""

    @property
    def id(self) -> str:
        return self.record.id

    def save(self, record: BoxRecord) -> None:
        """Replace the record, on disk first."""
        temporary = self.directory / f"{RECORD_FILE}.new"
        temporary.write_text(record.model_dump_json())
        temporary.replace(self.directory / RECORD_FILE)
        self.record = record

    def close(self) -> None:
        for fd in (self._directory_fd, self.boxd_fd):
            if fd is not None:
                os.close(fd)
        self._directory_fd = -1
        self.boxd_fd = None

    @property
    def open_directory(self) -> Path:
        """The box's directory also after something else has deleted it, until `close`."""
        return Path(f"/proc/self/fd/{self._directory_fd}")

    async def control(self, timeout_seconds: float = _CALL_SECONDS, **message: object) -> JsonMessage:
        """Send one request to boxd. Raises its refusal as BoxFaultError, and BoxNotFoundError if it is silent."""
        connection, reply, _fds = await self._call(CONTROL_SOCKET, message, timeout_seconds)
        connection.close()
        return reply

    async def boxd_pid(self, timeout_seconds: float) -> int:
        """Return the pid of boxd as the kernel knows it, also if boxd does not answer. Raises BoxNotFoundError if no
        process listens, and BoxFaultError if too many calls wait."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(timeout_seconds):
                    path = f"/proc/self/fd/{self._directory_fd}/{CONTROL_SOCKET}"
                    await asyncio.get_running_loop().sock_connect(connection, path)
            except TimeoutError as error:
                raise BoxFaultError("unavailable", "the box does not answer") from error
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise BoxNotFoundError(self.id) from error
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", credentials)[0])

    async def files(self, **message: object) -> tuple[JsonMessage, list[int]]:
        """Send one request to the box's file helper; the caller closes the returned fds."""
        connection, reply, fds = await self._call(FILES_SOCKET, message, _CALL_SECONDS)
        connection.close()
        return reply, fds

    async def dial(self, port: int) -> socket.socket:
        """Connect to a port inside the box. Raises BoxFaultError if the port is not open."""
        connection, _reply, (fd,) = await self._call(CONTROL_SOCKET, {"op": "dial", "port": port}, _CALL_SECONDS)
        connection.close()
        dialled = socket.socket(fileno=fd)
        dialled.setblocking(False)
        return dialled

    async def follow(self, **message: object) -> BoxStream:
        """Send a `start` or `attach` request; the caller closes the stream."""
        connection, reply, fds = await self._call(CONTROL_SOCKET, message, _CALL_SECONDS)
        return BoxStream(connection, reply, fds[0])

    async def _call(
        self, socket_name: str, message: JsonMessage, timeout_seconds: float
    ) -> tuple[socket.socket, JsonMessage, list[int]]:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_seconds):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connection, f"/proc/self/fd/{self._directory_fd}/{socket_name}")
                await loop.sock_sendall(connection, encode_line(message))
                reply, fds = await _receive(connection)
            if "fault" in reply:
                raise BoxFaultError(*reply["fault"])
            return connection, reply, fds
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise BoxFaultError("unavailable", "the box does not answer") from error
            if isinstance(error, (ConnectionError, FileNotFoundError)):
                raise BoxNotFoundError(self.id) from error
            raise


async def _receive(connection: socket.socket) -> tuple[JsonMessage, list[int]]:
    """Return the first line received and the fds sent with it."""
    buffer, fds = bytearray(), list[int]()
    while b"\n" not in buffer:
        await _readable(connection)
        data, received, _flags, _address = socket.recv_fds(connection, 1 << 20, _MAX_FDS)
        fds += received
        if not data:
            for fd in fds:
                os.close(fd)
            raise ConnectionError("boxd closed the connection")
        buffer += data
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(buffer), fds


def _readable(connection: socket.socket) -> Awaitable[None]:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    fd = connection.fileno()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    ready.add_done_callback(lambda _: loop.remove_reader(fd))
    return ready
