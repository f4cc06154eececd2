"""The gateway as an ASGI app: one origin serves the control plane and every box.

Headers, not paths, decide which of the two a request is for. `create_gateway_app` has no side effects before startup,
so any ASGI server can run the app.
"""

import base64
import errno
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.box_fleet import RETRY_AFTER, Fleet
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.control_plane import ControlPlane
from sandbox_gateway.envd import serve_rpc
from sandbox_gateway.files import serve_files
from sandbox_gateway.fork_client import ForkServer
from sandbox_gateway.images import Catalogue
from sandbox_gateway.port_proxy import serve_port
from sandbox_gateway.settings import GATEWAY_MARK, GatewaySettings
from sandbox_gateway.wire_errors import HTTP_STATUS_OF_CODE, BoxNotFoundError, RefusalError, unsupported

_log = structlog.get_logger(__name__)

ENVD_PORT = "49983"
_SIGNED_OPERATIONS = {"GET": "read", "POST": "write"}
_SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN}


def create_gateway_app(
    settings: GatewaySettings, catalogue: Catalogue, start_fork_server: Callable[[], ForkServer]
) -> Starlette:
    fleet = Fleet(settings, catalogue, start_fork_server)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await fleet.start()
        try:
            yield
        finally:
            await fleet.stop()

    return Starlette(
        routes=[Route("/health", _health), *ControlPlane(fleet, settings).routes()],
        middleware=[Middleware(BoxDispatch, fleet=fleet), Middleware(ApiKey, api_key=settings.api_key)],
        exception_handlers={**_HANDLERS, HTTPException: _on_http, Exception: _on_failure},
        lifespan=lifespan,
    )


async def _health(_request: Request) -> Response:
    return Response(status_code=204, headers={GATEWAY_MARK: "1"})


class BoxDispatch:
    """Handle requests for a box; pass the others on to the control plane."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        target = _box_and_port(request)
        if target is None and not _is_signed(request):
            await self._app(scope, receive, send)
            return
        try:
            response = await self._serve_signed(request) if target is None else await self._serve(request, *target)
        except tuple(_HANDLERS) as error:
            handler = next(handler for kind, handler in _HANDLERS.items() if isinstance(error, kind))
            response = await handler(request, error)
        await response(scope, receive, send)

    async def _serve(self, request: Request, box_id: str, port: str) -> Response:
        box = self._fleet.get(box_id)
        if box.record.state != "running":
            raise BoxNotFoundError(box_id)
        if port != ENVD_PORT:
            return await serve_port(request, box, port)
        path = request.url.path
        if path == "/health":
            return Response(status_code=204)
        if _is_signed(request) and "x-access-token" not in request.headers:
            return await serve_files(request, _signed_box(request, [box]))
        if not _same(request.headers.get("x-access-token", ""), box.record.token):
            raise RefusalError(401, "unauthorized access, please provide a valid access token")
        if path == "/files":
            return await serve_files(request, box)
        service, _, method = path.strip("/").partition("/")
        if request.method != "POST" or not method:
            raise RefusalError(404, f"{request.method} {path[:200]} is not known")
        return await serve_rpc(request, box, service, method)

    async def _serve_signed(self, request: Request) -> Response:
        box = _signed_box(request, self._fleet.all())
        if box.record.state != "running":
            raise BoxNotFoundError(box.id)
        return await serve_files(request, self._fleet.get(box.id))


class ApiKey:
    """Require the API key for every control-plane call except `/health`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            request = Request(scope, receive)
            if not _same(request.headers.get("x-api-key", ""), self._api_key):
                await _refused(401, "Invalid API key")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _box_and_port(request: Request) -> tuple[str, str] | None:
    """Return (box id, port) from `E2b-Sandbox-Id` or a host name `<port>-<id>.<domain>`; None for the control plane."""
    box_id = request.headers.get("e2b-sandbox-id")
    if box_id is not None:
        return box_id, request.headers.get("e2b-sandbox-port", ENVD_PORT)
    port, dash, rest = request.headers.get("host", "").partition(".")[0].partition("-")
    return (rest, port) if dash and port.isdigit() else None


def _is_signed(request: Request) -> bool:
    """The SDK's `download_url` and `upload_url` are signed, for clients that have neither key nor token."""
    return request.url.path == "/files" and "signature" in request.query_params


def _signed_box(request: Request, boxes: Iterable[BoxClient]) -> BoxClient:
    """Return the box whose token made the signature; a shared origin's URL names none. Raises RefusalError(401)."""
    given, query = request.query_params["signature"], request.query_params
    expires = query.get("signature_expiration")
    if expires is not None and (not expires.isascii() or not expires.isdigit() or int(expires[:15]) < time.time()):
        raise RefusalError(401, "signature is already expired")
    found = [
        box
        for box in boxes
        if hmac.compare_digest(given.encode(), _signature(request, box.record.token, expires).encode())
    ]
    if not found:
        raise RefusalError(401, "invalid signature")
    return found[0]


def _signature(request: Request, token: str, expires: str | None) -> str:
    query = request.query_params
    parts = [query.get("path", ""), _SIGNED_OPERATIONS.get(request.method, ""), query.get("username", ""), token]
    raw = ":".join(parts if expires is None else [*parts, expires])
    return "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status)


async def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return JSONResponse({"code": error.status, "message": error.message}, error.status, headers=error.headers)


async def _on_fault(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BoxFaultError)
    return _refused(HTTP_STATUS_OF_CODE.get(error.code, 500), error.message)


async def _on_gone(_request: Request, error: Exception) -> Response:
    """The SDK recognises a box that does not exist any more by a 502 with this message."""
    assert isinstance(error, BoxNotFoundError)
    return JSONResponse({"sandboxId": error.box_id[:64], "message": "The sandbox was not found", "code": 502}, 502)


async def _on_shortage(request: Request, error: Exception) -> Response:
    """The machine lacks something for now, such as disk space: the caller may ask again. Other errors are raised."""
    if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
        raise error
    _log.error("shortage", call=f"{request.method} {request.url.path[:200]}", reason=str(error))
    message = f"the gateway's machine: {error.strerror}"
    return JSONResponse({"code": 503, "message": message}, 503, headers=RETRY_AFTER)


async def _on_failure(_request: Request, error: Exception) -> Response:
    """Answer in the protocol's form, which the SDK needs; the server logs the exception and closes the connection."""
    message = f"the gateway failed: {type(error).__name__}"
    return JSONResponse({"code": 500, "message": message}, 500, headers={"Connection": "close"})


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        call = f"{request.method} {request.url.path[:200]}"
        return _refused(404, unsupported(call, "sandboxes are created, connected, listed and killed here"))
    return JSONResponse({"code": error.status_code, "message": error.detail}, error.status_code, headers=error.headers)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    RefusalError: _on_refusal,
    BoxFaultError: _on_fault,
    BoxNotFoundError: _on_gone,
    OSError: _on_shortage,
}
"""Answers to the errors that calls of the control plane and of boxes raise alike."""
