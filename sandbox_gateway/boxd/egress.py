"""The box's only network path: 127.0.0.1:<port> inside, spliced to the same port of the host.

The listener is opened inside the box's network namespace and served from outside, so there is no interface, route or
firewall rule to misconfigure.
"""

import selectors
import socket
from dataclasses import dataclass, field
from functools import partial

from sandbox_gateway.boxd.namespaces import Namespaces

_BUFFER_BYTES = 256 << 10
_BACKLOG = 64


def open_egress(ports: list[int], namespaces: Namespaces, selector: selectors.BaseSelector) -> None:
    for port in ports:
        listener = namespaces.within("net", socket.socket)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, partial(_accept, listener, port, selector))


def _accept(listener: socket.socket, port: int, selector: selectors.BaseSelector, _events: int) -> None:
    try:
        inside, _ = listener.accept()
    except OSError:
        return
    inside.setblocking(False)
    outside = socket.socket()
    outside.setblocking(False)
    outside.connect_ex(("127.0.0.1", port))
    Splice(inside, outside, selector)


@dataclass(slots=True)
class _Side:
    """One socket, the bytes that wait to be written to it, and the directions that are still open."""

    socket: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    open_for_reading: bool = True
    peer_ended: bool = False
    events: int = 0


class Splice:
    """Copy in both directions without blocking: a slow reader only stops the other side of its own connection."""

    def __init__(self, inside: socket.socket, outside: socket.socket, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sides = (_Side(inside), _Side(outside))
        self._update()

    def _update(self) -> None:
        for index, side in enumerate(self._sides):
            other = self._sides[1 - index]
            wanted = selectors.EVENT_READ if side.open_for_reading and len(other.pending) < _BUFFER_BYTES else 0
            wanted |= selectors.EVENT_WRITE if side.pending else 0
            if wanted == side.events:
                continue
            if not side.events:
                self._selector.register(side.socket, wanted, partial(self._handle, index))
            elif wanted:
                self._selector.modify(side.socket, wanted, partial(self._handle, index))
            else:
                self._selector.unregister(side.socket)
            side.events = wanted

    def _handle(self, index: int, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(self._sides[index], self._sides[1 - index])
            if events & selectors.EVENT_WRITE:
                self._write(self._sides[index])
            if any(side.open_for_reading or side.pending for side in self._sides):
                self._update()
            else:
                self._close()
        except BlockingIOError:
            return
        except OSError:
            self._close()

    def _read(self, side: _Side, other: _Side) -> None:
        data = side.socket.recv(_BUFFER_BYTES)
        if data:
            other.pending += data
        else:
            side.open_for_reading = False
            other.peer_ended = True
        self._write(other)

    def _write(self, side: _Side) -> None:
        if side.pending:
            try:
                sent = side.socket.send(side.pending)
            except BlockingIOError:
                return
            del side.pending[:sent]
        if side.peer_ended and not side.pending:
            side.peer_ended = False
            side.socket.shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        for side in self._sides:
            if side.events:
                self._selector.unregister(side.socket)
                side.events = 0
            side.socket.close()
