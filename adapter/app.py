"""The adapter's HTTP app: routes, authentication, body limits. `serve_adapter` runs it for `ratchet part adapter`."""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import structlog
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from adapter.auth import SessionAuth, token_digest
from adapter.body_encoding import decoded
from adapter.conversation import RequestOptions
from adapter.dialects.base import Dialect, Failure, InvalidRequestError, asks_for_stream
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.gc_tuning import collect_when_idle, freeze_startup_objects
from adapter.http_limits import MAX_HEAD_BYTES, LimitedHttpProtocol
from adapter.prompt.prompt_builder import PromptTooLongError, UnknownModelError
from adapter.replies import (
    REFUSALS,
    BodyTooLargeError,
    FailureReply,
    FailureStream,
    HeldReply,
    JsonReply,
    SlowBodyError,
    StreamReply,
    classify,
    failure_reply,
    wait_for_disconnect,
)
from adapter.served_sets import MakeRenderer, ReadSets, ServedSets, SetNotServedError, renderer_of
from adapter.settings import AdapterSettings
from adapter.store_outage import HeldCalls, StoreOutage, heartbeat_adapter
from adapter.turns.capture import Capture, PendingCall
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from adapter.turns.telemetry import bind_session
from adapter.vllm_parsers import VllmParsers
from ratchet.errors import StoreUnavailableError
from ratchet.web_server import WebServer
from store import session_notes
from store.database import Database
from store.migration import wait_for_schema
from store.sessions import SessionRow

_LOG = structlog.get_logger("ratchet.adapter")

_MOST_NOTED = 10_000
_T = TypeVar("_T")


class RefusalNotes:
    """The first refusal of each session, recorded before its client hears of it, since a refused call has no turn.

    An agent whose first call is refused ends without an answer; the agent stage says why it was.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: OrderedDict[int, None] = OrderedDict()  # sessions, the least recently noted first

    async def note(self, session_id: int, reason: str) -> None:
        """Raises StoreUnavailableError; then it may be repeated."""
        if session_id in self._noted:
            return
        await self._database.run(session_notes.note_refusal, session_id, reason)
        self._noted[session_id] = None
        if len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Parts:
    settings: AdapterSettings
    database: Database
    auth: SessionAuth
    sets: ServedSets
    router: EngineRouter
    outage: StoreOutage
    held: HeldCalls
    waits: EngineWaits
    refusals: RefusalNotes


def create_adapter_app(
    settings: AdapterSettings,
    database: Database,
    has_schema: Callable[[], bool] = lambda: True,
    read_sets: ReadSets | None = None,
    make_renderer: MakeRenderer = renderer_of,
) -> Starlette:
    """Build the app. The model's tokenizer and template are read at once, vLLM's output parsers are imported later.

    Calls are held until `has_schema`, as while the store is away. `read_sets`: the settings of each engine set, of
    which `settings` are the first; None if all have these. Raises ConfigError if no set has a tokenizer and a template
    that can be used.
    """
    router = EngineRouter(database)
    outage = StoreOutage(database)
    waits = EngineWaits(database, router, outage)
    parts = _Parts(
        settings,
        database,
        SessionAuth(database, has_schema),
        ServedSets(settings, database, router, outage, waits, read_sets, make_renderer),
        router,
        outage,
        HeldCalls(settings.max_held_calls_per_session, settings.max_held_calls, settings.max_held_bytes),
        waits,
        RefusalNotes(database),
    )
    chat, messages, responses = ChatDialect(), MessagesDialect(), ResponsesDialect()

    async def unknown_route(request: Request, error: Exception) -> Response:
        is_messages = "anthropic-version" in request.headers or request.url.path.startswith("/v1/messages")
        detail = error.detail if isinstance(error, HTTPException) else ""
        sentence = f"unknown route: {request.method} {request.url.path[:200]} is not served here ({detail})"
        return FailureReply(messages if is_messages else chat, Failure.UNKNOWN_ROUTE, sentence)

    async def health(_: Request) -> Response:
        """The status is 200 also while calls are held: a balancer that sent them elsewhere would end them."""
        if not has_schema() or outage.is_away:
            return JSONResponse({"status": "calls wait for the store"})
        if not parts.sets.first.parser.ready:
            return JSONResponse({"status": "calls wait for the output parsers"})
        if parts.sets.unusable:  # without the reason, which names paths of this machine, since boxes may ask
            names = ", ".join(sorted(parts.sets.unusable))
            return JSONResponse({"status": f"calls of engine set {names} wait: see the adapter's log"})
        return JSONResponse({"status": "ok"})

    routes = _routes(parts, chat, messages, responses, health)
    app = Starlette(
        routes=routes,
        lifespan=lambda _: _lifespan(parts, database, has_schema),
        exception_handlers={HTTPException: unknown_route},
    )
    app.router.redirect_slashes = False
    return app


def _routes(
    parts: _Parts, chat: Dialect, messages: Dialect, responses: Dialect, health: Callable[..., Any]
) -> list[BaseRoute]:
    """The routes, each with and without a slash at its end.

    A slash changes nothing: clients do not send a body again to another address, and Starlette's own redirect names the
    host of the request, which may be any.
    """
    posts = {
        "/v1/chat/completions": partial(_call, parts, chat),
        "/v1/messages": partial(_call, parts, messages),
        "/v1/responses": partial(_call, parts, responses),
        "/v1/messages/count_tokens": partial(_count, parts, messages),
        "/v1/responses/input_tokens": partial(_count, parts, responses),
    }
    models: Callable[..., Any] = partial(_models, parts)
    gets = {"/v1/models": models, "/v1/models/{name}": models, "/health": health}
    return [
        *(Route(path + end, handler, methods=["POST"]) for path, handler in posts.items() for end in ("", "/")),
        *(Route(path + end, handler) for path, handler in gets.items() for end in ("", "/")),
    ]


@asynccontextmanager
async def _lifespan(parts: _Parts, database: Database, has_schema: Callable[[], bool]) -> AsyncIterator[None]:
    parser = parts.sets.first.parser
    if not parser.ready:  # a daemon thread: the import takes long, and a stop must not wait for it
        threading.Thread(target=_load_parsers, args=(parser,), name="parsers", daemon=True).start()
    background_tasks = [
        asyncio.create_task(heartbeat_adapter(database, parts.outage, lambda: parser.ready and has_schema())),
        asyncio.create_task(parts.sets.keep_reading()),
        asyncio.create_task(collect_when_idle(lambda: any(one.capture.is_busy for one in parts.sets.all()))),
    ]
    try:
        yield
    finally:
        for task in background_tasks:
            task.cancel()
        await parts.sets.close()
        parts.waits.close()
        await parts.router.close()


def _load_parsers(parser: VllmParsers) -> None:
    parser.load()
    freeze_startup_objects()


async def _call(parts: _Parts, dialect: Dialect, request: Request) -> Response:
    capture: Capture | None = None

    async def start(session: SessionRow) -> PendingCall:
        nonlocal capture
        capture = (await parts.sets.of(session)).capture
        try:
            return await capture.start(session, body, dialect, request.headers)
        except REFUSALS as error:
            await parts.refusals.note(session.id, classify(error).message)
            raise

    async def start_again() -> PendingCall:
        return await start(await parts.auth.authenticate(request.headers))

    async def start_when_available() -> PendingCall:
        with parts.waits.storing(row.id):
            return await parts.sets.hold(start_again)

    def reply(outcome: PendingCall | BaseException, in_stream: bool = False) -> Response:
        return _reply(parts, dialect, outcome, in_stream, capture)

    held = contextlib.ExitStack()
    try:
        began_at = datetime.now(UTC)
        row = await _authenticate(parts, request)
        bind_session(row)
        parts.waits.note_access(row.id, began_at)
        try:
            body = await _body(parts, request)
        except (BodyTooLargeError, InvalidRequestError) as error:
            await _held_for_client(
                parts, request, row.id, 0, partial(parts.refusals.note, row.id, classify(error).message)
            )
            raise
        try:
            with parts.waits.storing(row.id):
                return reply(await start(row))
        except (StoreUnavailableError, SetNotServedError):
            streams = asks_for_stream(body)
            held.enter_context(parts.held.add(row.id, len(body)))
        later = partial(reply, in_stream=streams)
        return HeldReply(start_when_available(), later, streams, parts.settings.ping_seconds, held)
    except (Exception, asyncio.CancelledError) as error:
        return reply(error)


async def _authenticate(parts: _Parts, request: Request) -> SessionRow:
    """Return the request's session; if it is not known and the store is away, before the body is read.

    The body of a request that has no valid token must not take memory for as long as the store is away. It is not known
    then whether the client wants a stream, so it gets no comments, and if it leaves, that is seen only later.
    """
    try:
        return await parts.auth.authenticate(request.headers)
    except StoreUnavailableError:
        with parts.held.add(token_digest(request.headers), 0):
            return await parts.outage.hold(lambda: parts.auth.authenticate(request.headers))


def _reply(
    parts: _Parts,
    dialect: Dialect,
    outcome: PendingCall | BaseException,
    in_stream: bool = False,
    capture: Capture | None = None,
) -> Response:
    """The response to a call that has begun in `capture`, or to one that failed. `in_stream`: a stream has begun.

    `classify` records the error, and the client gets it in the vendor's form. On SIGTERM uvicorn cancels all requests.
    """
    match outcome:
        case PendingCall():
            kind = StreamReply if outcome.options.stream else JsonReply
            assert capture is not None
            return kind(capture, dialect, outcome, parts.settings.ping_seconds)
        case PromptTooLongError() if dialect.too_long_in_stream and outcome.options.stream:
            return FailureStream(dialect.stream(outcome.options), *classify(outcome))
    if in_stream:
        return FailureStream(dialect.stream(RequestOptions(dialect.name)), *classify(outcome))
    return failure_reply(dialect, outcome)


async def _count(parts: _Parts, dialect: Dialect, request: Request) -> Response:
    async def count() -> int:
        present = await parts.auth.authenticate(request.headers)
        capture = (await parts.sets.of(present)).capture
        return await capture.count_tokens(present, body, dialect, request.headers)

    try:
        row = await _authenticate(parts, request)
        body = await _body(parts, request)
        with parts.waits.storing(row.id):
            number = await _held_for_client(parts, request, row.id, len(body), count)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})
    except (Exception, asyncio.CancelledError) as error:
        return failure_reply(dialect, error)


async def _held_for_client(
    parts: _Parts, request: Request, session: int | bytes, num_bytes: int, work: Callable[[], Awaitable[_T]]
) -> _T:
    """Return what `work` returns, held while the store is away or the set is not served, and the client is connected.

    What is left of the request's body is dropped. Raises ClientDisconnect, TooManyHeldError and what `work` raises.
    """
    with contextlib.suppress(StoreUnavailableError, SetNotServedError):
        return await work()
    with parts.held.add(session, num_bytes):
        working = asyncio.ensure_future(parts.sets.hold(work))
        disconnected = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientDisconnect
        finally:
            working.cancel()
            disconnected.cancel()


async def _models(parts: _Parts, request: Request) -> Response:
    """The one model, alone or in a list, with the fields of both vendors; each SDK reads its own."""
    dialect: Dialect = MessagesDialect() if "anthropic-version" in request.headers else ChatDialect()
    try:
        authenticate = partial(parts.auth.authenticate, request.headers)
        row = await _held_for_client(parts, request, token_digest(request.headers), 0, authenticate)
    except (Exception, asyncio.CancelledError) as error:
        return failure_reply(dialect, error)
    name = row.model
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet", "type": "model", "display_name": name}
    model["created_at"] = "1970-01-01T00:00:00Z"
    if (asked := request.path_params.get("name")) is not None:
        if asked != name:
            return failure_reply(dialect, UnknownModelError(f"model {asked!r} is not served here"))
        return JSONResponse(model)
    return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def _body(parts: _Parts, request: Request) -> bytes:
    """Read the request's body. Raises BodyTooLargeError, InvalidRequestError, SlowBodyError or ClientDisconnect."""
    data = bytearray()
    seconds = parts.settings.body_seconds
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > parts.settings.max_body_bytes:
                    data.clear()  # the error, which may wait for the store, refers to it
                    raise BodyTooLargeError(f"the request is larger than {parts.settings.max_body_bytes} bytes")
    except TimeoutError:
        raise SlowBodyError(f"the request was not complete after {seconds:g} seconds") from None
    if encoding := request.headers.get("content-encoding", ""):
        return await asyncio.to_thread(decoded, bytes(data), encoding, parts.settings.max_body_bytes)
    return bytes(data)


def server_config(app: Starlette, settings: AdapterSettings) -> uvicorn.Config:
    """The HTTP server of `serve_adapter`."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,  # its lines go to the process's own handler
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
        http=LimitedHttpProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
    )


def run_adapter(settings: AdapterSettings, read_sets: ReadSets | None = None) -> None:
    """Run the adapter until SIGTERM or SIGINT, on uvloop: asyncio's own event loop takes a third of a turn's time."""
    uvloop.run(serve_adapter(settings, read_sets))


async def serve_adapter(settings: AdapterSettings, read_sets: ReadSets | None = None) -> None:
    """Run the adapter until SIGTERM or SIGINT. It listens at once, and holds calls until the store can be used.

    Calls in flight at its end are found in the store by their clients' retries. Raises MachineError if the store has
    the schema of a later version.
    """
    database = Database(settings.database_url, settings.pool_size)
    schema = asyncio.create_task(wait_for_schema(database))
    try:
        has_schema = partial(_has_schema, schema)
        app = create_adapter_app(settings, database, has_schema, read_sets)
        server = WebServer(server_config(app, settings))
        schema.add_done_callback(partial(_stop_without_schema, server))
        freeze_startup_objects()
        await server.serve()
        if schema.done():
            schema.result()
    finally:
        schema.cancel()
        await database.close()


def _has_schema(schema: "asyncio.Task[None]") -> bool:
    return schema.done() and schema.exception() is None


def _stop_without_schema(server: uvicorn.Server, schema: "asyncio.Task[None]") -> None:
    """Stop if the schema is one that this program cannot read; `serve_adapter` raises the error."""
    if not schema.cancelled() and schema.exception() is not None:
        server.should_exit = True
