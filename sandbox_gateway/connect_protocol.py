"""The Connect protocol as the SDK uses it: JSON, unary and server-streaming, no compression. This module knows framing
and error shapes, not the meaning of calls. Specification: connectrpc.com/docs/protocol."""

import json
import struct
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.wire_errors import HTTP_STATUS_OF_CODE, RefusalError

STREAM_TYPE = "application/connect+json"
UNARY_TYPE = "application/json"
MAX_BODY_BYTES = 64 << 20
_HEADER = struct.Struct(">BI")
_FLAG_MESSAGE, _FLAG_END = 0, 2


class Body(BaseModel):
    """Base of request bodies: unknown fields are ignored, as in protobuf."""

    model_config = ConfigDict(frozen=True, extra="ignore")


BodyT = TypeVar("BodyT", bound=Body)


def envelope(message: object, flag: int = _FLAG_MESSAGE) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(flag, len(data)) + data


def end_of_stream(error: BoxFaultError | None = None) -> bytes:
    return envelope({"error": {"code": error.code, "message": error.message}} if error else {}, _FLAG_END)


def stream_error(error: BoxFaultError) -> Response:
    """Return the answer of a stream that fails before its first message: status 200, the error in the end envelope."""
    return Response(end_of_stream(error), media_type=STREAM_TYPE)


def unary_error(error: BoxFaultError) -> JSONResponse:
    return JSONResponse({"code": error.code, "message": error.message}, HTTP_STATUS_OF_CODE.get(error.code, 500))


def require_content_type(request: Request, expected: str) -> None:
    if request.headers.get("content-type", "").split(";")[0].strip() != expected:
        raise RefusalError(415, f"this call takes {expected}", {"Accept-Post": expected})


async def read_body(request: Request) -> bytes:
    """Return the whole body. Raises RefusalError(413) beyond the limit, without reading further."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RefusalError(413, f"request body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def parse(model: type[BodyT], data: bytes) -> BodyT:
    """Parse a body. Raises BoxFaultError(invalid_argument) that names the first bad field."""
    try:
        return model.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BoxFaultError("invalid_argument", f"{where or 'request body'}: {first['msg']}") from error


def take_envelope(buffer: bytearray) -> bytes | None:
    """Remove one complete message envelope from the front and return its payload; None if it is not complete."""
    if len(buffer) < _HEADER.size:
        return None
    flag, length = _HEADER.unpack_from(buffer)
    if flag != _FLAG_MESSAGE:
        raise BoxFaultError("invalid_argument", "compressed messages are not supported")
    end = _HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    return payload


def unwrap_envelope(data: bytes) -> bytes:
    """Return the payload of a body that is exactly one message envelope."""
    rest = bytearray(data)
    payload = take_envelope(rest)
    if payload is None or rest:
        raise BoxFaultError("invalid_argument", "the body is not one Connect envelope")
    return payload


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop unset optionals, as protobuf's JSON does."""
    return {name: value for name, value in fields.items() if value not in ("", None)}
