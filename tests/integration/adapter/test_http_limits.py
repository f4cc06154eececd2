"""Connections of clients that send too much, too slowly, read nothing, or leave: each ends, without a traceback.

The sandbox is not trusted; a connection of one session must not cost the others memory or time.
"""

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from structlog.testing import capture_logs

from adapter import http_limits
from adapter.http_limits import LimitedHttpProtocol
from stack.ports import free_port
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9}).encode()


@pytest.fixture
async def address(
    postgres_url: str, model_dir: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    monkeypatch.setattr(LimitedHttpProtocol, "head_seconds", 0.3)
    monkeypatch.setattr(LimitedHttpProtocol, "write_seconds", 0.3)
    async with adapter_here(adapter_settings(postgres_url, model_dir, body_seconds=0.3)) as served:
        yield served


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(address)
    return await asyncio.open_connection(url.host, url.port)


def head(opened: Opened, length: int, path: str = "/v1/messages") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {opened.token}\r\ncontent-length: {length}\r\n\r\n".encode()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that the server sends until it ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""


async def is_served(address: str, opened: Opened) -> bool:
    async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=60) as http:
        return (await http.post("/v1/messages", content=BODY)).status_code == 200


@pytest.mark.parametrize(
    "part",
    [b"x-%d: " + b"a" * 1000 + b"\r\n", b"a" * 1000, b"GET /" + b"a" * 1000],
    ids=["many headers", "one endless line", "an endless path"],
)
async def test_a_head_without_end_is_refused(address: str, engine: ScriptedEngine, opened: Opened, part: bytes) -> None:
    reader, writer = await connect(address)
    sent = 0
    writer.write(b"" if part.startswith(b"GET") else b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx: ")
    try:
        while sent < 12_000_000 and not reader.at_eof():
            writer.write(part.replace(b"%d", str(sent).encode()))
            sent += len(part)
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    assert sent < 8_000_000 and await ended(reader) in (b"", http_limits._TOO_LARGE)
    writer.close()
    assert await is_served(address, opened)


CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE_CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
AFTER_HEAD = {
    "a trailer": WHOLE_CHUNK + b"0\r\nx: ",
    "an extension of a chunk": b"5;x=",
    "the next head": WHOLE_CHUNK + b"0\r\n\r\nGET / HTTP/1.1\r\nx: ",
}


async def send_without_end(writer: asyncio.StreamWriter, part: bytes) -> int:
    """Send up to 59 MB; return the number of bytes that were sent before the connection ended."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 59_000_000 and not writer.transport.is_closing():
            writer.write(part * (50_000 // len(part)))
            await writer.drain()
            await asyncio.sleep(0)
            sent += 50_000
    return sent


@pytest.mark.parametrize("answered", [None, 401, 404], ids=["no answer", "an early 401", "an early 404"])
@pytest.mark.parametrize("where", list(AFTER_HEAD))
async def test_a_line_without_end_behind_a_head_is_refused(
    address: str, engine: ScriptedEngine, opened: Opened, where: str, answered: int | None
) -> None:
    token = b"unknown" if answered == 401 else opened.token.encode()
    reader, writer = await connect(address)
    writer.write(CHUNKED % (b"/nothing" if answered == 404 else b"/v1/messages", token))
    if answered:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d " % answered)
    writer.write(AFTER_HEAD[where])
    assert await send_without_end(writer, b"a") < 8_000_000
    await ended(reader)
    writer.close()
    assert await is_served(address, opened)


async def test_lines_without_end_in_place_of_a_request_are_refused(
    address: str, engine: ScriptedEngine, opened: Opened
) -> None:
    _, writer = await connect(address)
    assert await send_without_end(writer, b"\r\n") < 8_000_000
    writer.close()
    assert await is_served(address, opened)


async def test_a_trailer_is_no_header(address: str, engine: ScriptedEngine, opened: Opened) -> None:
    """The token comes too late, behind the body, so the request has none."""
    reader, writer = await connect(address)
    named = CHUNKED % (b"/v1/messages", b"unknown")
    trailer = b"0\r\nx-api-key: %s\r\n\r\n" % opened.token.encode()
    writer.write(named.replace(b"x-api-key: unknown\r\n", b"") + WHOLE_CHUNK + trailer)
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_requests_without_end_on_one_connection_are_not_kept(
    address: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """A few may wait for the answer to the first one; each gets its answer, in order."""
    reader, writer = await connect(address)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * (9))
    for _ in range(9):
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    assert await send_without_end(writer, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") < 8_000_000
    await ended(reader)
    writer.close()
    assert await is_served(address, opened)


@pytest.mark.parametrize("rest", [b"", b"a", b"1\r\na\r\n"])
async def test_the_rest_of_a_request_that_was_answered_early_has_a_time_limit(
    address: str, engine: ScriptedEngine, opened: Opened, rest: bytes
) -> None:
    reader, writer = await connect(address)
    writer.write(CHUNKED % (b"/v1/messages", b"unknown") + rest)
    assert b" 401 " in await ended(reader)
    writer.close()


@pytest.mark.parametrize("sent", [b"\r\n", b"P", b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n"])
async def test_a_slow_later_head_ends_the_connection(
    address: str, engine: ScriptedEngine, opened: Opened, sent: bytes
) -> None:
    reader, writer = await connect(address)
    whole = head(opened, len(BODY)) + BODY
    for _ in range(2):
        writer.write(whole)
        found = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", found)
        assert found.startswith(b"HTTP/1.1 200") and length
        await reader.readexactly(int(length[1]))
    writer.write(sent)
    assert (await ended(reader)).splitlines()[:1] in ([], [b"HTTP/1.1 400 Bad Request"])
    writer.close()


async def test_the_answer_to_a_large_head_says_so(address: str, engine: ScriptedEngine, opened: Opened) -> None:
    reader, writer = await connect(address)
    writer.write((head(opened, 0)[:-2] + b"x-long: ").ljust(http_limits.MAX_HEAD_BYTES + 1, b"a"))
    assert await ended(reader) == http_limits._TOO_LARGE
    writer.close()
    assert await opened.turns() == [] and await is_served(address, opened)


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n"])
async def test_a_slow_head_ends_the_connection(
    address: str, engine: ScriptedEngine, opened: Opened, sent: bytes
) -> None:
    reader, writer = await connect(address)
    writer.write(sent)
    assert await ended(reader) == b""
    writer.close()


async def test_a_complete_head_ends_its_time_limit(address: str, engine: ScriptedEngine, opened: Opened) -> None:
    """A connection that was opened later, and sends nothing, ends while the first one waits for its answer."""
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    reader, writer = await connect(address)
    writer.write(head(opened, len(BODY)) + BODY)
    await engine.wait_for_calls(1)
    silent_reader, silent_writer = await connect(address)
    assert await ended(silent_reader) == b""
    silent_writer.close()
    await engine.release("gate")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_a_slow_body_gets_the_vendors_error(
    address: str, engine: ScriptedEngine, opened: Opened, path: str
) -> None:
    reader, writer = await connect(address)
    writer.write(head(opened, 100, path) + BODY[:5])
    answer = await ended(reader)
    assert answer.startswith(b"HTTP/1.1 408") and b"request timed out" in answer
    writer.close()


async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is larger than all buffers between the two processes."""
    monkeypatch.setattr(LimitedHttpProtocol, "write_seconds", 0.3)
    size = 64 << 20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    config = uvicorn.Config(app, port=free_port(), http=LimitedHttpProtocol, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await connect(f"http://127.0.0.1:{config.port}")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(60):
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        while server.server_state.connections:
            await asyncio.sleep(0.01)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len(await ended(reader)) < size
    writer.close()
    server.should_exit = True
    await task


@pytest.mark.parametrize("reads", [False, True], ids=["leaves", "ends its side, then reads"])
async def test_an_answer_is_not_delivered_to_a_client_that_leaves_before_it_fits(
    monkeypatch: pytest.MonkeyPatch, adapter: str, engine: ScriptedEngine, opened: Opened, reads: bool
) -> None:
    """The answer waits behind one that the client does not read; its bytes are never handed to the transport."""
    made = LimitedHttpProtocol.connection_made

    def with_small_buffers(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=1024)
        made(self, transport)

    monkeypatch.setattr(LimitedHttpProtocol, "connection_made", with_small_buffers)
    await engine.script({"ids": engine.ids("unread " * 20_000)}, {"ids": engine.ids("the second answer")})
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    url = httpx.URL(adapter)
    await asyncio.get_running_loop().sock_connect(client, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(head(opened, len(BODY)) + BODY)
    await opened.wait_delivered(1)
    second = BODY.replace(b"go", b"go on")
    writer.write(head(opened, len(second)) + second)
    async with asyncio.timeout(60):
        while [turn.state for turn in await opened.turns()] != ["completed", "completed"]:
            await asyncio.sleep(0.01)
        if reads:
            writer.write_eof()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert b"the second answer" not in await ended(reader)
        else:
            writer.transport.abort()
        while (await opened.turns())[1].lease_owner is not None:
            await asyncio.sleep(0.01)
    writer.close()
    assert [turn.delivered for turn in await opened.turns()] == [True, False]
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=60) as http:
        assert "the second answer" in (await http.post("/v1/messages", content=second)).text
    assert len((await engine.seen())["calls"]) == 2 and len(await opened.wait_delivered(2)) == 2


LEAVE: dict[str, Any] = {
    "in the head": (30, False),
    "in the body": (None, False),
    "while it waits": (0, False),
    "while it waits for a stream": (0, True),
}


@pytest.mark.parametrize("when", list(LEAVE))
async def test_a_client_that_leaves_causes_no_traceback(
    address: str, engine: ScriptedEngine, opened: Opened, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    length, stream = LEAVE[when]
    body = BODY[:-1] + b', "stream": true}' if stream else BODY
    whole = head(opened, len(body)) + body
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    with capture_logs() as logs, caplog.at_level(logging.WARNING):
        for reset in (False, True):
            _, writer = await connect(address)
            writer.write(whole[:length] if length else whole[:-5] if length is None else whole)
            await writer.drain()
            if length == 0:
                await engine.wait_for_calls(1)
            if reset:
                writer.transport.abort()
            writer.close()
        await engine.release("gate")
        await asyncio.sleep(0)
        assert await is_served(address, opened)
    assert [log for log in logs if log["log_level"] == "error"] == []
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_sixty_thousand_tiny_messages(address: str, engine: ScriptedEngine, database: Database) -> None:
    """Ten times the messages cost ten to twenty times as much, because more of them do not fit into the processor's
    caches; work that grows with the square would cost a hundred times as much. Those that cannot fit are refused
    before anything is rendered.
    """
    cpu_seconds: dict[str, list[float]] = {}
    async with httpx.AsyncClient(base_url=address, timeout=300) as http:
        for number, size in enumerate([600, 6_000, 6_000, 60_000]):  # the first one warms up
            for kind, roles in (("users", ["user"]), ("mixed", ["user", "assistant"])):
                member = 10 * number + len(roles)
                roomy = await open_rollout(database, member, max_context_tokens=10**7)
                messages = [{"role": roles[at % len(roles)], "content": "x"} for at in range(size - 1)]
                messages.append({"role": "user", "content": "x"})
                body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 9})
                began = time.process_time()
                reply = await http.post("/v1/messages", content=body, headers={"x-api-key": roomy.token})
                cpu_seconds.setdefault(f"{kind} {size}", []).append(round(time.process_time() - began, 3))
                assert reply.status_code == 200, reply.text[:300]
        small = await open_rollout(database, 99, max_context_tokens=32_000)
        reply = await http.post("/v1/messages", content=body, headers={"x-api-key": small.token})
    print(f"CPU seconds: {cpu_seconds}")
    for kind in ("users", "mixed"):
        assert cpu_seconds[f"{kind} 60000"][0] < 30 * sum(cpu_seconds[f"{kind} 6000"]) / 2, cpu_seconds
    assert reply.status_code == 400 and "prompt is too long" in reply.json()["error"]["message"]
    assert await small.turns() == []
