"""HTTP to a port in a box (`get_host(port)`): a server of an agent needs no address of its own."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Container

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.wire_errors import RefusalError, unsupported

_READ_BYTES = 256 << 10
_CODE_INTERPRETER_PORT = 49_999
# Headers of one connection only or set by this proxy; our own server has already answered `expect`.
NOT_PASSED_ON = {*b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()}
EXCHANGE_ERRORS = (OSError, h11.ProtocolError, EOFError)
_LEFT_OUT = NOT_PASSED_ON | {b"date", b"server"}  # the latter are set by our server
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
    try:
        return await Exchange(connection).run(request, NOT_PASSED_ON | _OURS)
    except EXCHANGE_ERRORS as error:
        reason = error or "it closed the connection"
        raise RefusalError(502, f"port {port} does not answer in HTTP: {reason}") from error


class Exchange:
    """One request and its response over one connection, which ends with them; both are streamed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection  # without a transport, which reads nothing more once a write has failed
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, request: Request, dropped: Container[bytes]) -> Response:
        """Pass the request on without the headers `dropped`. Raises EXCHANGE_ERRORS if no answer begins."""
        try:
            return await self._run(request, dropped)
        except BaseException:
            self._connection.close()
            raise

    async def _run(self, request: Request, dropped: Container[bytes]) -> Response:
        headers = [(b"connection", b"close"), *(one for one in request.headers.raw if one[0] not in dropped)]
        has_length = any(name == b"content-length" for name, _ in headers)
        if not has_length and request.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            headers.append((b"transfer-encoding", b"chunked"))
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        await self._send(h11.Request(method=request.method, target=target, headers=headers))
        sending, answer = asyncio.ensure_future(self._send_body(request)), asyncio.ensure_future(self._next())
        try:
            await asyncio.wait((sending, answer), return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(OSError):  # the other end may have answered before it closed the connection
                await (sending if sending.done() else answer)
            head = await answer
            assert isinstance(head, h11.Response), "what comes first is a response or an error"
            if head.status_code < 400:  # else it refuses what is left of the body
                await asyncio.wait((sending,))
        finally:
            sending.cancel()
            answer.cancel()
            await asyncio.gather(sending, answer, return_exceptions=True)
        response = StreamingResponse(self._body(), status_code=head.status_code)
        response.raw_headers = [(name, value) for name, value in head.headers if name not in _LEFT_OUT]
        return response

    async def _send_body(self, request: Request) -> None:
        async for chunk in request.stream():
            if chunk:
                await self._send(h11.Data(data=chunk))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, self._http.send(event) or b"")

    async def _next(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
            if event is h11.NEED_DATA:
                self._http.receive_data(await asyncio.get_running_loop().sock_recv(self._connection, _READ_BYTES))
        if not isinstance(event, h11.Event):
            raise EOFError(str(event))
        return event

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        finally:
            self._connection.close()
