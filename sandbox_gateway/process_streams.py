"""A process's input and output: client-streamed stdin (`StreamInput`), and Connect events replayed from the first byte.
Reading the spool and following its growth is the gateway's most frequent work."""

import asyncio
import base64
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sandbox_gateway.box_client import BoxClient, BoxStream
from sandbox_gateway.boxd.processes import FRAME
from sandbox_gateway.boxd.protocol import BoxFaultError, JsonMessage
from sandbox_gateway.connect_protocol import (
    MAX_BODY_BYTES,
    STREAM_TYPE,
    Body,
    end_of_stream,
    envelope,
    parse,
    take_envelope,
)

_READ_BYTES = 256 << 10
_STREAM_NAMES = {1: "stdout", 2: "stderr", 3: "pty"}


class Selector(Body):
    pid: int = 0
    tag: str = ""


class _Start(Body):
    process: Selector


class InputBytes(Body):
    """Exactly one of the two is set: a process has either a terminal or pipes."""

    stdin: str = ""
    pty: str = ""


class _Data(Body):
    input: InputBytes


class _Message(Body):
    start: _Start | None = None
    data: _Data | None = None


async def stream_input(request: Request, box: BoxClient) -> Response:
    """Forward input: the first message names the process, later ones carry its bytes."""
    buffer, target = bytearray(), None
    async for chunk in request.stream():
        buffer += chunk
        if len(buffer) > MAX_BODY_BYTES:
            raise BoxFaultError("invalid_argument", f"a message is larger than {MAX_BODY_BYTES} bytes")
        while (payload := take_envelope(buffer)) is not None:
            message = parse(_Message, payload)
            if message.start is not None:
                target = message.start.process
            elif message.data is not None:
                if target is None:
                    raise BoxFaultError("invalid_argument", "the first message must name the process")
                await send_input(box, target, message.data.input)
    return Response(envelope({}) + end_of_stream(), media_type=STREAM_TYPE)


async def send_input(box: BoxClient, target: Selector, given: InputBytes) -> JsonMessage:
    """Pass input, which is base64, on to a process. Raises BoxFaultError."""
    data = given.stdin or given.pty
    try:
        base64.b64decode(data, validate=True)
    except ValueError as error:
        raise BoxFaultError("invalid_argument", "input.stdin is not base64") from error
    return await box.control(op="input", data=data, pid=target.pid, tag=target.tag)


async def process_events(
    stream: BoxStream, keepalive_seconds: float, started_here: bool, seconds: float = 0.0
) -> AsyncIterator[bytes]:
    """Yield the start event, existing and new output, and the end event. Closes the stream, also if the client
    disconnects. `seconds`: after which a listener is sent away, 0 for never; the process goes on."""
    offset, until = 0, time.monotonic() + (seconds or float("inf"))
    try:
        yield envelope({"event": {"start": {"pid": stream.pid}}})
        while True:
            while offset < stream.size:
                data = await _read_spool(stream.spool, min(stream.size - offset, _READ_BYTES), offset)
                events, used = _data_events(data)
                offset += used
                yield events
            if stream.end is not None:
                yield _last_events(stream.end, started_here)
                return
            try:
                await stream.wait_for_news(min(keepalive_seconds, max(0.0, until - time.monotonic())))
            except TimeoutError:
                if time.monotonic() >= until:
                    yield end_of_stream(BoxFaultError("deadline_exceeded", "the time of this listener is over"))
                    return
                yield envelope({"event": {"keepalive": {}}})
    except ConnectionError:
        yield end_of_stream(BoxFaultError("unavailable", "the sandbox ended before the stream completed"))
    finally:
        stream.close()


def _data_events(data: bytes) -> tuple[bytes, int]:
    """Return envelopes of the complete frames at the front of `data`, and the number of bytes consumed."""
    events, position = [], 0
    while len(data) - position >= FRAME.size:
        kind, length = FRAME.unpack_from(data, position)
        end = position + FRAME.size + length
        if end > len(data):
            break
        encoded = base64.b64encode(data[position + FRAME.size : end]).decode()
        events.append(envelope({"event": {"data": {_STREAM_NAMES[kind]: encoded}}}))
        position = end
    return b"".join(events), position


def _last_events(end: dict[str, Any], started_here: bool) -> bytes:
    """Report a time limit only to the call that set it; elsewhere the end event would race the client's own timer. A
    command whose output was lost has no result, so every caller gets an error that it may repeat."""
    if "lostOutput" in end:
        return end_of_stream(BoxFaultError("resource_exhausted", end["lostOutput"]))
    if end["timedOut"] and started_here:
        return end_of_stream(BoxFaultError("deadline_exceeded", "the command ran out of time and was killed"))
    return (
        envelope({"event": {"end": {name: value for name, value in end.items() if name != "timedOut"}}})
        + end_of_stream()
    )


async def _read_spool(fd: int, length: int, offset: int) -> bytes:
    """Read fresh output, which is in the page cache, at once, and in a thread what would wait for the disk."""
    buffer = bytearray(length)
    try:
        count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except OSError:
        return await asyncio.to_thread(os.pread, fd, length, offset)
    return bytes(buffer[:count]) if count else await asyncio.to_thread(os.pread, fd, length, offset)
