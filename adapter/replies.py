"""Write a call's answer to the socket: pings and what can be shown while it is sampled, its end only after its commit.

A turn is trained only if it was delivered, or if its whole answer came back in a later prompt. Delivered means that the
answer's last byte was handed to the transport; whether the client has received it is unknown.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer
from adapter.dialects.base import Dialect, Failure, InvalidRequestError, SseWriter, StateNotKeptError
from adapter.endpoint import EndpointRejectedError
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.prompt_builder import PromptTooLongError, TurnLimitError, UnknownModelError
from adapter.store_outage import TooManyHeldError
from adapter.turns.capture import Capture, PendingCall
from ratchet.errors import EngineRejectedError, StoreUnavailableError

_LOG = structlog.get_logger("ratchet.adapter")
_SHOW_SECONDS = 0.05
"""Least time between two updates of a stream, each of which costs its client an event."""
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class BodyTooLargeError(Exception):
    """The request has more bytes than `max_body_bytes`."""


class UnreadEncodingError(InvalidRequestError):
    """The body has a `content-encoding` that is not read here."""


class SlowBodyError(Exception):
    """The request did not arrive within `body_seconds`."""


class OtherAnswerError(Exception):
    """The answer does not begin with what the client has seen.

    Another process has sampled it anew, or what was shown of this process's own sample was wrong (`check_live`).
    """


REFUSALS = (
    BodyTooLargeError,
    InvalidRequestError,
    PromptTooLongError,
    TemplateRefusedError,
    TurnLimitError,
    UnknownModelError,
)
"""Errors of calls that are refused for what they contain, and so may be caused by the policy."""


class ClassifiedFailure(NamedTuple):
    """A failure of the protocols and the message for the client."""

    failure: Failure
    message: str


_INTERRUPTED = (StoreUnavailableError, OtherAnswerError, asyncio.CancelledError)
_SENTENCES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Failure, str], ...] = (
    (UnauthorisedError, Failure.UNAUTHORISED, "the session token is unknown or its session has ended"),
    (PromptTooLongError, Failure.PROMPT_TOO_LONG, "{}"),
    (BodyTooLargeError, Failure.TOO_LARGE, "request too large: {}"),
    (SlowBodyError, Failure.TIMED_OUT, "request timed out: {}"),
    (TurnLimitError, Failure.TURN_LIMIT, "{}"),
    (UnknownModelError, Failure.UNKNOWN_MODEL, "unknown model: {}"),
    (StateNotKeptError, Failure.STATE_NOT_KEPT, "invalid request: {}"),
    ((InvalidRequestError, TemplateRefusedError), Failure.INVALID, "invalid request: {}"),
    (EndpointRejectedError, Failure.INVALID, "the endpoint refused the request: {}"),
    (EngineRejectedError, Failure.INVALID, "the engine refused this call: {}"),
    (ClientDisconnect, Failure.INVALID, "the client disconnected before its request was complete"),
    (TooManyHeldError, Failure.UNAVAILABLE, "too many calls wait to begin, try again"),
    (_INTERRUPTED, Failure.UNAVAILABLE, "the service is restarting, try again"),
)
"""Errors, what they are to the protocols, and the sentence for the client. The first match counts."""


def classify(error: BaseException) -> ClassifiedFailure:
    """Map an exception to a failure of the protocols. Unknown exceptions are logged here and nowhere else.

    `activities/harnesses/cli_exits.py` reads the message with which a program ended, and recognises it by its first
    words: keep both in step.
    """
    for kinds, failure, sentence in _SENTENCES:
        if isinstance(error, kinds):
            return ClassifiedFailure(failure, sentence.format(error))
    _LOG.error("request failed", exc_info=error)
    return ClassifiedFailure(Failure.INTERNAL, f"internal error: {type(error).__name__}")


class _CallReply(Response):
    """Wait for a call's answer and write it. Subclasses define the start, the time of waiting and the end."""

    def __init__(self, capture: Capture, dialect: Dialect, call: PendingCall, ping_seconds: float) -> None:
        self.capture = capture
        self.dialect = dialect
        self.call = call
        self.ping_seconds = ping_seconds
        self.stream = dialect.stream(call.options)
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await self.begin(send)
            try:
                await self.wait(send, disconnected)
            except asyncio.CancelledError as stopped:  # by uvicorn, on SIGTERM; then this process's lease ends
                await self.fail(send, *classify(stopped))
                return
            if disconnected.done():
                await self.capture.detach(self.call)
                return
            await self.end(send, disconnected)
        finally:
            disconnected.cancel()

    async def wait(self, send: Send, disconnected: "asyncio.Task[None]") -> None:
        while not self.call.task.done() and not disconnected.done():
            # Taken before what is there is shown, or what comes meanwhile would wait for the next change.
            waited: set[asyncio.Future[Any]] = {self.call.task, disconnected} | self.changes()
            await self.show(send)
            ready, _ = await asyncio.wait(waited, timeout=self.ping_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ready:
                await self.ping(send)

    async def end(self, send: Send, disconnected: "asyncio.Task[None]") -> None:
        error = asyncio.CancelledError() if self.call.task.cancelled() else self.call.task.exception()
        if error is None and not self.stream.shown.begins(self.call.task.result().message):
            error = OtherAnswerError()
        if error is not None:
            await self.fail(send, *classify(error))
            await self.capture.detach(self.call)
            return
        answer = self.call.task.result()
        await self.finish(send, answer)
        if disconnected.done():  # uvicorn's `send` drops the message without an error if the client left meanwhile
            await self.capture.detach(self.call)
        else:
            await self.capture.deliver(answer)

    async def begin(self, send: Send) -> None:
        """Write what can be written before the answer is there."""

    async def ping(self, send: Send) -> None:
        """Write that the answer is still awaited."""

    def changes(self) -> "set[asyncio.Future[None]]":
        """Futures of which one is done when `show` has more to write."""
        return set()

    async def show(self, send: Send) -> None:
        """Write what can be shown of the answer by now."""

    async def finish(self, send: Send, answer: Answer) -> None:
        raise NotImplementedError

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        raise NotImplementedError


class StreamReply(_CallReply):
    """Server-sent events."""

    async def begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        await _write(send, self.stream.opening(self.call.prompt_tokens), more=True)

    async def ping(self, send: Send) -> None:
        await _write(send, self.stream.ping(), more=True)

    def changes(self) -> "set[asyncio.Future[None]]":
        client = self.call.client
        if client.live is not None:
            return {client.live.changed()}
        return set() if client.connected.done() else {client.connected}

    async def show(self, send: Send) -> None:
        client = self.call.client
        if client.live is None or client.turn_id is None:
            return
        if data := self.stream.growth(client.turn_id, client.live.released):
            await _write(send, data, more=True)
            await asyncio.wait({self.call.task}, timeout=_SHOW_SECONDS)

    async def finish(self, send: Send, answer: Answer) -> None:
        await _write(send, self.stream.closing(answer), more=False)

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        await _write(send, self.stream.failed(failure, message), more=False)


class JsonReply(_CallReply):
    """One JSON body. No ping is sent, because the status cannot be changed after a first byte."""

    async def finish(self, send: Send, answer: Answer) -> None:
        body = self.dialect.reply(self.call.options, answer)
        await _write_response(send, Response(body, media_type="application/json"))

    async def fail(self, send: Send, failure: Failure, message: str) -> None:
        await _write_response(send, FailureReply(self.dialect, failure, message))


@dataclass(eq=False, repr=False)
class HeldReply(Response):
    """Hold a call that has not begun because the store is unavailable or its engine set is not served, then reply as to
    any other.

    `_starting` begins the call; `_reply` makes the response from its result or its error. A client that `_streams` gets
    comments meanwhile, which all readers of server-sent events skip; nothing else of the stream is known yet. `_held`
    is closed when the call waits no more.
    """

    _starting: Coroutine[Any, Any, PendingCall]
    _reply: Callable[[PendingCall | BaseException], Response]
    _streams: bool
    _ping_seconds: float
    _held: contextlib.ExitStack
    background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        starting = asyncio.create_task(self._starting)
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            if self._streams:
                await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
            while not starting.done() and not disconnected.done():
                ready, _ = await asyncio.wait(
                    {starting, disconnected}, timeout=self._ping_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if self._streams and not ready:
                    await _write(send, b": waiting to begin\n\n", more=True)
            outcome: PendingCall | BaseException | None = None
            if starting.done():
                outcome = starting.exception() or starting.result()
        except asyncio.CancelledError as stopped:  # by uvicorn, on SIGTERM
            outcome = stopped
        finally:
            starting.cancel()
            disconnected.cancel()
            self._held.close()
        if outcome is not None:
            await self._reply(outcome)(scope, receive, _without_start(send) if self._streams else send)


def _without_start(send: Send) -> Send:
    """Send all of a response but its status and headers, which the client has already."""

    async def send_rest(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return send_rest


def failure_reply(dialect: Dialect, error: BaseException) -> Response:
    """The reply to a call that failed before it had an answer."""
    reply = FailureReply(dialect, *classify(error))
    if isinstance(error, UnreadEncodingError):  # the vendors' forms have no error of this kind, HTTP has
        reply.status_code = 415
        reply.headers["accept-encoding"] = "gzip, deflate, zstd"
    return reply


class FailureReply(Response):
    """An error in the vendor's form. Only `unavailable` has `retry-after`."""

    def __init__(self, dialect: Dialect, failure: Failure, message: str) -> None:
        status, body = dialect.failure(failure, message)
        headers = {"retry-after": "1"} if failure is Failure.UNAVAILABLE else {}
        if failure in (Failure.TIMED_OUT, Failure.TOO_LARGE):  # the rest of the request is not read
            headers = {"connection": "close"}
        super().__init__(body, status, headers, "application/json")


class FailureStream(Response):
    """An error as an event of the stream that the client asked for."""

    def __init__(self, stream: SseWriter, failure: Failure, message: str) -> None:
        super().__init__(stream.opening(0) + stream.failed(failure, message))
        self.raw_headers += _STREAM_HEADERS


async def _write_response(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await _write(send, bytes(response.body), more=False)


async def _write(send: Send, data: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. What is left of the request's body is read and dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
