"""The adapter's HTTP app: routes, authentication, body limits. A pure factory.

Why here: agents believe that they talk to their vendor; this is where they arrive.
Called by: `serve_adapter` (`ratchet adapter`) and the tests.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from adapter.auth import SessionAuth
from adapter.dialects.base import Dialect
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.gc_tuning import collect_when_idle, freeze_startup_objects
from adapter.heartbeat import heartbeat_adapter
from adapter.output_parser import OutputParser
from adapter.prompt.prompt_builder import PromptTooLongError
from adapter.prompt.renderer import Renderer
from adapter.replies import BodyTooLargeError, FailureReply, FailureStream, JsonReply, StreamReply, classify
from adapter.settings import AdapterSettings
from adapter.turns.capture import Capture
from adapter.turns.routing import EngineRouter
from adapter.vllm_parsers import VllmParsers
from ratchet.store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")


@dataclass(frozen=True, slots=True)
class _Parts:
    settings: AdapterSettings
    sessions: SessionAuth
    capture: Capture
    router: EngineRouter
    parser: VllmParsers


def create_adapter_app(settings: AdapterSettings, database: Database) -> FastAPI:
    """Reads the model's tokenizer and template at once (ConfigError where they cannot be used); the parsers are imported later."""
    renderer = Renderer(settings.model_path, settings.template_kwargs)
    router = EngineRouter(database)
    parser = VllmParsers(settings.model_path, settings.tool_parser, settings.reasoning_parser, settings.template_kwargs)
    parts = _Parts(
        settings,
        SessionAuth(database),
        Capture(settings, database, renderer, OutputParser(renderer, parser), router),
        router,
        parser,
    )
    app = FastAPI(lifespan=lambda _: _lifespan(parts, database), openapi_url=None, docs_url=None, redoc_url=None)
    chat, messages, responses = ChatDialect(), MessagesDialect(), ResponsesDialect()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _call(parts, chat, request)

    @app.post("/v1/messages")
    async def anthropic_messages(request: Request) -> Response:
        return await _call(parts, messages, request)

    @app.post("/v1/responses")
    async def openai_responses(request: Request) -> Response:
        return await _call(parts, responses, request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        return await _count(parts, messages, request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await _models(parts, request)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    return app


@asynccontextmanager
async def _lifespan(parts: _Parts, database: Database) -> AsyncIterator[None]:
    if not parts.parser.ready:  # a daemon: importing vLLM takes long, and a stop must not wait for it
        threading.Thread(target=_load_parsers, args=(parts.parser,), name="parsers", daemon=True).start()
    beside = [
        asyncio.create_task(heartbeat_adapter(database, lambda: parts.parser.ready)),
        asyncio.create_task(collect_when_idle(lambda: parts.capture.busy)),
    ]
    try:
        yield
    finally:
        for task in beside:
            task.cancel()
        await parts.capture.close()
        await parts.router.close()


def _load_parsers(parser: VllmParsers) -> None:
    parser.load()
    freeze_startup_objects()


async def _call(parts: _Parts, dialect: Dialect, request: Request) -> Response:
    try:
        session = await parts.sessions.authenticate(request.headers)
        pending = await parts.capture.start(session, await _body(parts, request), dialect, request.headers)
    except PromptTooLongError as error:
        if dialect.too_long_in_stream and error.wishes.stream:
            return FailureStream(dialect.stream(error.wishes), *classify(error))
        return FailureReply(dialect, *classify(error))
    except Exception as error:  # the one recording place of this process: whatever it is gets the vendor's shape
        return FailureReply(dialect, *classify(error))
    reply = StreamReply if pending.wishes.stream else JsonReply
    return reply(parts.capture, dialect, pending, parts.settings.ping_seconds)


async def _count(parts: _Parts, dialect: Dialect, request: Request) -> Response:
    try:
        session = await parts.sessions.authenticate(request.headers)
        body = await _body(parts, request)
        return JSONResponse({"input_tokens": await parts.capture.count_tokens(session, body, dialect, request.headers)})
    except Exception as error:
        return FailureReply(dialect, *classify(error))


async def _models(parts: _Parts, request: Request) -> Response:
    """One list in the form of either vendor: each SDK reads its own fields."""
    dialect: Dialect = MessagesDialect() if "anthropic-version" in request.headers else ChatDialect()
    try:
        session = await parts.sessions.authenticate(request.headers)
    except Exception as error:
        return FailureReply(dialect, *classify(error))
    name = session.model
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet", "type": "model", "display_name": name}
    model["created_at"] = "1970-01-01T00:00:00Z"
    return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def _body(parts: _Parts, request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > parts.settings.max_body_bytes:
            raise BodyTooLargeError(f"the request is larger than {parts.settings.max_body_bytes} bytes")
    return bytes(data)


async def serve_adapter(settings: AdapterSettings) -> None:
    """Runs the adapter until SIGTERM or SIGINT. Calls in flight are handed over: their clients' retries find them in the store."""
    import uvicorn

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )  # a line per turn would cost as much as a turn
    database = Database(settings.database_url, settings.pool_size)
    try:
        await database.wait()
        app = create_adapter_app(settings, database)
        freeze_startup_objects()
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
        await uvicorn.Server(config).serve()
    finally:
        await database.close()
