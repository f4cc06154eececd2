"""Limits of a connection: how large a request's head may be, how slowly it may arrive, how long a client may not read.

The sandbox is not trusted, and uvicorn has no such limits: a head of any size is kept in memory, and a connection on
which no whole head arrives, or whose client reads nothing, stays open.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Largest request line with all headers, and largest trailer. Real clients send 2 KiB."""
MAX_PIPELINED = 8
"""Requests that may wait on one connection for the answer to an earlier one. Real clients send none."""
HEAD_SECONDS = 20.0
"""Time limit for a request's headers, from the connection's begin, or from the first byte of a later request.

It also limits the rest of a request that was answered before its end. uvicorn's `timeout_keep_alive` limits the time
between two requests.
"""
WRITE_SECONDS = 120.0
"""The longest time for which a client may read nothing of an answer that does not fit into the socket's buffers."""

_TOO_LARGE_BODY = (  # with the fields of both vendors: nothing is known of the client yet
    b'{"type":"error","error":{"type":"invalid_request_error","code":null,'
    b'"message":"invalid request: the headers are too large"}}'
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_LARGE_BODY), _TOO_LARGE_BODY)
)

_OF_UPGRADES = (b"upgrade", b"http2-settings")
"""Headers, and options of the header `connection`, that offer another protocol."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits above. A body's limits are in `adapter/app.py`, which knows the vendor.

    All bytes that are no body count as a head's: extensions of chunks, trailers, and what is sent in place of a
    request. The count begins anew with each byte of a body and with the end of a request.

    An offer to change the protocol (`Upgrade: h2c`) is ignored, as RFC 9110, section 7.8 allows. The parser stops
    behind the head of such a request and takes its body for the other protocol, so a new parser gets the head without
    the offer.
    """

    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_in_body = False  # or in what follows it: the parser is between a head's end and its request's end
        self._offers_upgrade = False  # the request whose head was parsed last; its body is still to be parsed
        self._has_advanced = False  # by the data that is parsed now
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        self._has_advanced = False
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing():
            return
        self._head_bytes = 0 if self._has_advanced else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif not self._is_in_body and not self._has_advanced:
            self._start_head_timer()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self._offers_upgrade:
                    self._offers_upgrade = False
                    data = self._head_without_offer() + data[offer.args[0] :]
                    self.parser = _new_parser(self)
                    continue
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("Invalid HTTP request received.")
            return

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [one for one in value.split(b",") if one.strip().lower() not in _OF_UPGRADES]
                value = b",".join(options).strip()
            if name not in _OF_UPGRADES and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:  # trailers are dropped: uvicorn would add them to the headers of a request in progress
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """After an exception, `send_400_response` is called."""
        self._stop_head_timer()
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the headers are too large")
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests wait for the answer to an earlier one")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers_upgrade = True
            return
        self._is_in_body = True
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return  # only the first parser's part of it
        self._is_in_body = False
        self._has_advanced = True
        self._stop_head_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a request that was answered before its end. The rest is dropped."""
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def eof_received(self) -> None:
        """Record that the client has left. The transport closes after its unsent bytes and drops what is written then.

        uvicorn records it only after that, which is too late for an answer that waits behind those bytes.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._end_write_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_write_stall()
        super().resume_writing()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._end_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        self._head_timer = None
        if self.pipeline:  # the server does not read on before these have their answers
            self._start_head_timer()
        else:
            self.transport.abort()

    def _refuse_head(self) -> None:
        """End the connection. No answer is written into that to a request before it."""
        self._stop_head_timer()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            self.transport.abort()

    def _end_write_stall(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser with the settings of uvicorn's own."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the connection's end be that of a body without a length: HTTP/1.0 has no chunks, and uvicorn sends some."""
    send = cycle.send
    has_length = False

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
