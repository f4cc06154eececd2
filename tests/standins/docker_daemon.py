"""A Docker daemon that executes nothing: it replays recorded bytes, and can lose the connection at any of them."""

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Self

MARK = b"{MARK}"
"""Stands in recorded output for the end mark that the exec's environment names."""
_MARK_ENTRY = "RATCHET_END_MARK="
_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass
class RecordedExec:
    """The output of an exec and the answer to its inspection. `stays_open`: a child holds its streams.

    `cut_after`: bytes of the stream, frame headers included, after which the connection ends; `by_reset`: not by FIN.
    """

    frames: list[tuple[int, bytes]]
    inspection: dict[str, Any] = field(default_factory=lambda: {"Running": False, "ExitCode": 0})
    stays_open: bool = False
    cut_after: int | None = None
    by_reset: bool = False

    def stream_bytes(self, mark: bytes) -> bytes:
        """Return the whole stream as the daemon sends it."""
        parts = [(number, data.replace(MARK, mark)) for number, data in self.frames]
        return b"".join(struct.pack(">BxxxL", number, len(data)) + data for number, data in parts)


def recorded(stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0, stays_open: bool = False) -> RecordedExec:
    """Return an exec whose output has come whole: each stream ends with the mark and the exit code."""
    end = MARK + f" {exit_code}.\n".encode()
    return RecordedExec([(1, stdout), (2, stderr), (1, end), (2, end)], stays_open=stays_open)


class DockerDaemonStandin:
    """Every exec is `played`, and its command is ignored.

    `answers`: JSON by the last part of an address, in place of the daemon's own; None: no answer at all. `refusal`:
    status, type and body of the answer to every request but that of the version.
    """

    def __init__(self) -> None:
        self.played = recorded()
        self.answers: dict[str, Any] = {}
        self.refusal: tuple[int, str, str] | None = None
        self.asked: list[tuple[str, Any]] = []
        self._marks: dict[str, bytes] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lengths = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")]
            body = await reader.readexactly(lengths[0]) if lengths else b""
            self.asked.append((head[0].split()[1].partition("/v1.44")[2], json.loads(body or b"null")))
            parts = head[0].split()[1].split("?")[0].strip("/").split("/")
            if self.refusal is not None and parts[-1] != "version":
                await _send(writer, *self.refusal)
            elif parts[-1] in self.answers:
                reply = self.answers[parts[-1]]
                await (asyncio.sleep(600) if reply is None else _send_json(writer, reply))
            elif parts[-1] == "start":
                await self._replay(self._marks[parts[-2]], reader, writer)
            elif parts[-1] == "exec":
                name = f"E{len(self._marks)}"
                entries = [entry.removeprefix(_MARK_ENTRY) for entry in json.loads(body)["Env"] if _MARK_ENTRY in entry]
                self._marks[name] = "".join(entries).encode()
                await _send_json(writer, {"Id": name})
            elif parts[-1] == "json" and parts[-2] in self._marks:
                await _send_json(writer, self.played.inspection | {"ProcessConfig": {"tty": False}})
            else:
                await _send_json(writer, {"Id": "C1", "ApiVersion": "1.44", "State": {"Running": True}})

    async def _replay(self, mark: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        writer.write(self.played.stream_bytes(mark)[: self.played.cut_after])
        await writer.drain()
        if self.played.by_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()
        elif self.played.stays_open:
            await reader.read()


async def _send_json(writer: asyncio.StreamWriter, value: Any) -> None:
    await _send(writer, 200, "application/json", json.dumps(value))


async def _send(writer: asyncio.StreamWriter, status: int, content_type: str, body: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nConnection: close\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    await writer.drain()
