"""Server-sent events: an open page hears that the rows behind it have changed, and loads itself again.

Each stream asks one cheap question every second, or every three seconds for pages of runs, and at most `_MAX_STREAMS`
streams are served, so that open pages cannot load the store. The page loads itself again after every event, because it
would otherwise miss the last one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import structlog
from fastapi import APIRouter, Request
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from ratchet.errors import StoreUnavailableError
from reads.changes import rollout_fingerprint, run_fingerprint, runs_fingerprint
from reads.reader_role import ReadOnlyStore, has_refused_value

Fingerprint = Callable[[AsyncConnection], Awaitable[str]]
live_router = APIRouter(prefix="/live")
_LOG = structlog.get_logger()
_LOOK_SECONDS = 1.0
_RUN_LOOK_SECONDS = 3.0
_PING_LOOKS = 5
_MAX_STREAMS = 64


@live_router.get("/runs")
async def stream_runs(request: Request) -> Response:
    return _stream(request, runs_fingerprint, _RUN_LOOK_SECONDS)


@live_router.get("/runs/{run_id}")
async def stream_run(request: Request, run_id: str) -> Response:
    return _stream(request, lambda connection: run_fingerprint(connection, run_id), _RUN_LOOK_SECONDS)


@live_router.get("/rollouts/{rollout_id}")
async def stream_rollout(request: Request, rollout_id: int) -> Response:
    return _stream(request, lambda connection: rollout_fingerprint(connection, rollout_id), _LOOK_SECONDS)


def _stream(request: Request, fingerprint: Fingerprint, look_seconds: float) -> Response:
    state = request.app.state
    if state.num_streams >= _MAX_STREAMS:
        return PlainTextResponse("too many live pages are open; reload this one by hand", 503)
    return StreamingResponse(
        _changes(request, state.store, fingerprint, look_seconds),
        media_type="text/event-stream",
        headers={"x-accel-buffering": "no"},
    )


async def _changes(
    request: Request, store: ReadOnlyStore, fingerprint: Fingerprint, look_seconds: float
) -> AsyncIterator[str]:
    state = request.app.state
    state.num_streams += 1
    known: str | None = None
    looks = 0
    try:
        yield "retry: 3000\n\n"
        while not state.stopping.is_set() and not await request.is_disconnected():
            try:
                async with store.read() as connection:
                    found = await fingerprint(connection)
                if found != known:  # also at the first look, because the page was read before it
                    yield "event: changed\ndata: changed\n\n"
                known = found
            except StoreUnavailableError as error:
                _LOG.warning("live page waits for the store", reason=str(error))
            except DBAPIError as error:
                if not has_refused_value(error):
                    raise
                return
            looks += 1
            if looks % _PING_LOOKS == 0:
                yield ": ping\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(state.stopping.wait(), look_seconds)
    finally:
        state.num_streams -= 1
