"""Answers on the wire: pings while the model thinks, the last byte only after the commit, and who saw it.

Why here: "delivered to the last byte" decides whether a turn is trained, and only the socket's side knows.
Called by: `app.py`.
"""

import asyncio

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer, RequestOptions
from adapter.dialects.base import Dialect, Failure, InvalidRequestError, SseWriter
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.prompt_builder import PromptTooLongError, TurnLimitError, UnknownModelError
from adapter.turns.capture import Capture, PendingCall
from ratchet.errors import EngineRejectedError, StoreUnavailableError

_LOG = structlog.get_logger("ratchet.adapter")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class BodyTooLargeError(Exception):
    """More bytes than `max_body_bytes`."""


def classify(error: BaseException) -> tuple[Failure, str]:
    """The one place where an exception becomes a failure of the protocols."""
    match error:
        case UnauthorisedError():
            return Failure.UNAUTHORISED, "the session token is unknown or its session has ended"
        case PromptTooLongError():
            return Failure.PROMPT_TOO_LONG, str(error)
        case BodyTooLargeError():
            return Failure.TOO_LARGE, str(error)
        case TurnLimitError():
            return Failure.TURN_LIMIT, str(error)
        case UnknownModelError():
            return Failure.UNKNOWN_MODEL, str(error)
        case InvalidRequestError() | TemplateRefusedError() | EngineRejectedError():
            return Failure.INVALID, str(error)
        case StoreUnavailableError() | asyncio.CancelledError():
            return Failure.UNAVAILABLE, "the service is restarting, try again"
    _LOG.error("request failed", exc_info=error)
    return Failure.INTERNAL, f"internal error: {type(error).__name__}"


class _CallReply(Response):
    """Waits for a call's answer and writes it; subclasses say what goes out before and with it."""

    def __init__(self, capture: Capture, dialect: Dialect, pending: PendingCall, ping_seconds: float) -> None:
        self.capture, self.dialect, self.pending, self.ping_seconds = capture, dialect, pending, ping_seconds
        self.wishes: RequestOptions = pending.wishes
        self.stream = dialect.stream(pending.wishes)
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await self.begin(send)
            while not self.pending.task.done() and not gone.done():
                ready, _ = await asyncio.wait(
                    {self.pending.task, gone}, timeout=self.ping_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not ready:
                    await self.ping(send)
            if gone.done():
                await self.capture.detach(self.pending)
                return
            await self.end(send)
        finally:
            gone.cancel()

    async def end(self, send: Send) -> None:
        error = asyncio.CancelledError() if self.pending.task.cancelled() else self.pending.task.exception()
        if error is not None:
            await self.fail(send, *classify(error))
            await self.capture.detach(self.pending)
            return
        answer = self.pending.task.result()
        await self.finish(send, answer)
        await self.capture.delivered(answer)

    async def begin(self, send: Send) -> None:
        raise NotImplementedError

    async def ping(self, send: Send) -> None:
        raise NotImplementedError

    async def finish(self, send: Send, answer: Answer) -> None:
        raise NotImplementedError

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        raise NotImplementedError


class StreamReply(_CallReply):
    """Server-sent events."""

    async def begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        await _write(send, self.stream.opening(self.pending.prompt_tokens), more=True)

    async def ping(self, send: Send) -> None:
        await _write(send, self.stream.ping(), more=True)

    async def finish(self, send: Send, answer: Answer) -> None:
        await _write(send, self.stream.closing(answer), more=False)

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        await _write(send, self.stream.failed(failure, message), more=False)


class JsonReply(_CallReply):
    """One JSON body. The connection is simply held: a status cannot be taken back once a first byte is out."""

    async def begin(self, send: Send) -> None:
        return

    async def ping(self, send: Send) -> None:
        return

    async def finish(self, send: Send, answer: Answer) -> None:
        await _whole(send, 200, self.dialect.reply(self.wishes, answer))

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        status, body = self.dialect.failure(failure, message)
        await _whole(send, status, body)


class FailureReply(Response):
    """A vendor's error; those worth another try carry `retry-after`."""

    def __init__(self, dialect: Dialect, failure: Failure, message: str) -> None:
        status, body = dialect.failure(failure, message)
        headers = {"retry-after": "1"} if failure is Failure.UNAVAILABLE else None
        super().__init__(body, status, headers, "application/json")


class FailureStream(Response):
    """A failure told in the stream that was asked for."""

    def __init__(self, stream: SseWriter, failure: Failure, message: str) -> None:
        super().__init__(stream.opening(0) + stream.failed(failure, message))
        self.raw_headers += _STREAM_HEADERS


async def _whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (503, 529):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _write(send, body, more=False)


async def _write(send: Send, data: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
