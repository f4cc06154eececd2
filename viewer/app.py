"""The viewer as an ASGI app, and its server process."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.errors import StoreUnavailableError
from ratchet.web_server import WebServer
from reads.reader_role import ReadOnlyStore, has_refused_value
from viewer.access import SECURITY_HEADERS, TokenGate
from viewer.live import live_router
from viewer.rendering import FOLDER, make_environment, respond
from viewer.routes.groups import group_pages
from viewer.routes.prometheus import prometheus_route
from viewer.routes.rollout_parts import rollout_part_pages
from viewer.routes.rollouts import rollout_pages
from viewer.routes.run_history import run_history_pages
from viewer.routes.runs import run_pages
from viewer.routes.search import search_pages
from viewer.routes.steps import step_pages
from viewer.routes.tasks import task_pages
from viewer.settings import LOOPBACK_HOSTS, ViewerSettings

_SHUTDOWN_SECONDS = 5
"""Requests that still run when the process ends are cut off after this time."""


@dataclass(slots=True, frozen=True)
class ErrorPage:
    """A page that says why the requested one cannot be shown."""

    status: int
    message: str

    async def shown(self, request: Request) -> Response:
        return await respond(request, "error.html", self, self.status)


def create_viewer_app(settings: ViewerSettings) -> FastAPI:
    """Return the app. Without a token only requests for a loopback host are answered, so that no other site's name can
    point a browser at it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with ReadOnlyStore(settings.database_url) as store:
            app.state.store = store
            yield

    app = FastAPI(title="Ratchet viewer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.templates = make_environment(settings)
    app.state.settings = settings
    app.state.num_streams = 0
    app.state.stopping = asyncio.Event()
    for router in (
        run_pages,
        run_history_pages,
        group_pages,
        task_pages,
        rollout_part_pages,
        rollout_pages,
        step_pages,
        search_pages,
        prometheus_route,
        live_router,
    ):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")

    @app.get("/health")
    async def health(request: Request) -> Response:
        async with request.app.state.store.read() as connection:
            await connection.exec_driver_sql("SELECT FROM installation LIMIT 1")
        return PlainTextResponse("ok")

    app.add_exception_handler(HTTPException, _show_error)
    app.add_exception_handler(RequestValidationError, _show_invalid)
    app.add_exception_handler(DBAPIError, _show_refused)
    app.add_exception_handler(StoreUnavailableError, _show_unavailable)
    # Level 4 takes a third of the time of the default and makes pages 6% larger.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)
    app.add_middleware(_SecurityHeaders)
    if settings.token is not None:
        app.add_middleware(TokenGate, token=settings.token)
    elif not settings.is_export:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_HOSTS, "[::1]"])
    return app


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await ErrorPage(error.status_code, str(error.detail)).shown(request)


async def _show_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
    return await ErrorPage(422, f"the address has a value that is not understood: {found}").shown(request)


async def _show_refused(request: Request, error: Exception) -> Response:
    """Name a value that Postgres cannot hold, such as an id that is too large. Raises any other error again."""
    if not has_refused_value(error):
        raise error
    message = "the address has a value that the store cannot hold, such as a number that is too large"
    return await ErrorPage(422, message).shown(request)


async def _show_unavailable(request: Request, error: Exception) -> Response:
    return await ErrorPage(503, str(error)).shown(request)


class _SecurityHeaders:
    """Add headers that keep other sites' scripts and frames out; answers of static files may be cached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_static = scope["type"] == "http" and scope["path"].startswith("/static/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                for name, value in SECURITY_HEADERS.items():
                    if name.encode() not in known and not (is_static and name == "cache-control"):
                        message["headers"].append((name.encode(), value.encode()))
            await send(message)

        await self._app(scope, receive, send_with_headers)


class ViewerServer(WebServer):
    """Serves the app, and ends its live pages before it waits for open connections."""

    def __init__(self, settings: ViewerSettings) -> None:
        self.app = create_viewer_app(settings)
        super().__init__(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                log_config=None,  # its lines go to the process's own handler
                log_level="warning",
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A full collection would go through everything that imports have made, and hold a page up for 0.2 s.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.stopping.set()
        await super().shutdown(sockets)
