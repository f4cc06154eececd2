"""The gateway as an ASGI app: one origin serves the control plane and every box.

Headers, not paths, decide which of the two a request is for. `create_gateway_app` has no side effects before startup,
so any ASGI server can run the app.
"""

import base64
import errno
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
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
from sandbox_gateway.box_fleet import Fleet
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.control_plane import ControlPlane
from sandbox_gateway.envd import serve_rpc
from sandbox_gateway.files import serve_files
from sandbox_gateway.fork_client import ForkServer
from sandbox_gateway.images import Catalogue
from sandbox_gateway.port_proxy import serve_port
from sandbox_gateway.settings import GATEWAY_MARK, GatewaySettings
from sandbox_gateway.wire_errors import HTTP_STATUS_OF_CODE, RETRY_AFTER, BoxNotFoundError, RefusalError, unsupported

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
        routes=[Route("/health", health), *ControlPlane(fleet, settings).routes()],
        middleware=[Middleware(BoxDispatch, fleet=fleet, api_key=settings.api_key)],
        exception_handlers={**dict.fromkeys(ERRORS, on_error), HTTPException: _on_http, Exception: on_failure},
        lifespan=lifespan,
    )


async def health(_request: Request) -> Response:
    return Response(status_code=204, headers={GATEWAY_MARK: "1"})


class BoxDispatch:
    """Handle requests for a box; pass the others on to the control plane, if they have the API key or are `/health`."""

    def __init__(self, app: ASGIApp, fleet: Fleet, api_key: str) -> None:
        self._app = app
        self._fleet = fleet
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        target = box_and_port(request)
        response: ASGIApp = self._app
        try:
            if target is not None:
                response = await self._serve(request, *target)
            elif _is_signed(request):
                response = await self._serve_signed(request)
            elif request.url.path != "/health" and not _same(request.headers.get("x-api-key", ""), self._api_key):
                raise RefusalError(401, "Invalid API key")
        except ERRORS as error:
            response = await on_error(request, error)
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


def box_and_port(request: Request) -> tuple[str, str] | None:
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


def _refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status, headers)


ERRORS = (RefusalError, BoxFaultError, BoxNotFoundError, OSError)
"""The errors that calls of the control plane and of boxes raise alike."""


async def on_error(request: Request, error: Exception) -> Response:
    """Answer to one of ERRORS, except those of the system after which asking again would not help; they are raised."""
    if isinstance(error, RefusalError):
        return _refused(error.status, error.message, error.headers)
    if isinstance(error, BoxFaultError):
        return _refused(HTTP_STATUS_OF_CODE.get(error.code, 500), error.message)
    if isinstance(error, BoxNotFoundError):  # the SDK recognises such a box by a 502 with this message
        return JSONResponse({"sandboxId": error.box_id[:64], "message": "The sandbox was not found", "code": 502}, 502)
    if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
        raise error
    _log.error("shortage", call=f"{request.method} {request.url.path[:200]}", reason=str(error))
    return _refused(503, f"the gateway's machine: {error.strerror}", RETRY_AFTER)


async def on_failure(_request: Request, error: Exception) -> Response:
    """Answer in the protocol's form, which the SDK needs; the server logs the exception and closes the connection."""
    return _refused(500, f"the gateway failed: {type(error).__name__}", {"Connection": "close"})


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        call = f"{request.method} {request.url.path[:200]}"
        return _refused(404, unsupported(call, "sandboxes are created, connected, listed and killed here"))
    return _refused(error.status_code, error.detail, error.headers)
