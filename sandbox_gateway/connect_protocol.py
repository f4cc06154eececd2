"""The Connect protocol as the SDK uses it: JSON, unary and server-streaming, no compression.

This module knows framing and error shapes, not the meaning of calls. Specification: connectrpc.com/docs/protocol.
"""

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
    """Return the answer of a stream that fails before its first message: status 200 with the error in the end
    envelope.
    """
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


def unwrap_envelope(data: bytes) -> bytes:
    """Return the payload of a body that is exactly one message envelope."""
    if len(data) < _HEADER.size:
        raise BoxFaultError("invalid_argument", "the body is not a Connect envelope")
    flag, length = _HEADER.unpack_from(data)
    if flag != _FLAG_MESSAGE or len(data) != _HEADER.size + length:
        raise BoxFaultError("invalid_argument", "the body is not one uncompressed Connect envelope")
    return data[_HEADER.size :]


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop unset optionals, as protobuf's JSON does."""
    return {name: value for name, value in fields.items() if value not in ("", None)}
