"""Client-streamed stdin (`StreamInput`): envelopes of one request, forwarded as they arrive."""

import base64
import struct

from starlette.requests import Request
from starlette.responses import Response

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.boxd.protocol import BoxFaultError, JsonMessage
from sandbox_gateway.connect_protocol import MAX_BODY_BYTES, STREAM_TYPE, Body, end_of_stream, envelope, parse

_HEADER = struct.Struct(">BI")


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
        while (message := _take_message(buffer)) is not None:
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


def _take_message(buffer: bytearray) -> _Message | None:
    """Remove one complete envelope from the front of the buffer; None if it has none."""
    if len(buffer) < _HEADER.size:
        return None
    flag, length = _HEADER.unpack_from(buffer)
    if flag != 0:
        raise BoxFaultError("invalid_argument", "compressed messages are not supported")
    if len(buffer) < _HEADER.size + length:
        return None
    payload = bytes(buffer[_HEADER.size : _HEADER.size + length])
    del buffer[: _HEADER.size + length]
    return parse(_Message, payload)
