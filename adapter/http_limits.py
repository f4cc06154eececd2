"""Limits of a connection: how large a request's head may be, how slowly it may arrive, how long a client may not read.

The sandbox is not trusted. h11 bounds what is kept of a head and of pipelined requests, but neither it nor uvicorn has
limits of time: a connection on which no whole head arrives, or whose client reads nothing, stays open.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 64 << 10
"""Largest part of a request line with headers, of a trailer or of a chunk's head that is kept while the rest is awaited
(uvicorn's `h11_max_incomplete_event_size`). Real clients send 2 KiB."""
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


class LimitedHttpProtocol(H11Protocol):
    """uvicorn's protocol with the limits above. A body's limits are in `adapter/app.py`, which knows the vendor."""

    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_head()

    def _limit_head(self) -> None:
        """Limit the time for the rest of a head of which a part has arrived, or of a request that has its answer."""
        is_answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if is_answered or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def _should_upgrade(self) -> bool:
        """Ignore offers of another protocol (`Upgrade: h2c`), as RFC 9110 allows, without uvicorn's warning."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed or oversized request. While an earlier answer is still sent, only close the connection."""
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        elif len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            self.transport.abort()

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
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_write_stall(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
