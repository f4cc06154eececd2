"""HTTP to a port in a box (`get_host(port)`): a server of an agent needs no address of its own."""

import asyncio
from collections.abc import AsyncIterator

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.wire_errors import RefusalError, unsupported

_READ_BYTES = 256 << 10
_CODE_INTERPRETER_PORT = 49_999
# Headers of one connection only or set by this proxy; our own server has already answered `expect`.
_NOT_PASSED_ON = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
}
_SET_BY_OUR_SERVER = {b"date", b"server"}
_OURS = {b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-access-token", b"x-api-key"}


async def serve_port(request: Request, box: BoxClient, port_text: str) -> Response:
    if not port_text.isascii() or not port_text.isdigit() or not 1 <= int(port_text[:6]) <= 65_535:
        raise RefusalError(400, f"{port_text[:16]!r} is no port")
    if "upgrade" in request.headers:
        what = f"an upgraded connection ({request.headers['upgrade'][:40]}) to a box's port"
        raise RefusalError(501, unsupported(what, "use plain HTTP, or a command in the box"))
    port = int(port_text)
    try:
        connection = await box.dial(port)
    except BoxFaultError:
        if port == _CODE_INTERPRETER_PORT:  # whose SDK would call the ordinary answer a time-out
            raise RefusalError(501, unsupported("the code interpreter", "use commands.run")) from None
        # The SDK recognises "port is not open".
        message = "The sandbox is running but port is not open"
        return JSONResponse({"sandboxId": box.id, "message": message, "port": port, "code": 502}, 502)
    exchange = _Exchange(*await asyncio.open_connection(sock=connection))
    try:
        return await exchange.run(request)
    except (OSError, h11.ProtocolError, EOFError) as error:
        exchange.close()
        raise RefusalError(
            502, f"port {port} does not answer in HTTP: {error or 'it closed the connection'}"
        ) from error
    except BaseException:
        exchange.close()
        raise


class _Exchange:
    """One request and its response over one connection, both streamed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.raw if name not in _NOT_PASSED_ON | _OURS]
        has_length = any(name == b"content-length" for name, _ in headers)
        if not has_length and request.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            headers.append((b"transfer-encoding", b"chunked"))
        target = request.scope["raw_path"] + (
            b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
        )
        self._send(h11.Request(method=request.method, target=target, headers=[*headers, (b"connection", b"close")]))
        async for chunk in request.stream():
            if chunk:
                self._send(h11.Data(data=chunk))
                await self._writer.drain()
        self._send(h11.EndOfMessage())
        await self._writer.drain()
        head = await self._next()
        while isinstance(head, h11.InformationalResponse):
            head = await self._next()
        assert isinstance(head, h11.Response), "a client that has sent its request sees a response or an error next"
        response = StreamingResponse(self._body(), status_code=head.status_code)
        response.raw_headers = [
            (name, value) for name, value in head.headers if name not in _NOT_PASSED_ON | _SET_BY_OUR_SERVER
        ]
        return response

    def close(self) -> None:
        self._writer.close()

    def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)

    async def _next(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        if not isinstance(event, h11.Event):
            raise EOFError(str(event))
        return event

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        finally:
            self.close()
