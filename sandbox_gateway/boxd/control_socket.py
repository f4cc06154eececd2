"""boxd's control socket: one request per connection; `start` and `attach` keep it open for updates of the process.

Requests: start, attach {pid, tag}, list, signal, input, resize, close_stdin, dial, deadline, freeze, ping, destroy.
`dial` answers with a connected socket as fd. `start` and `attach` answer {pid, size, end} with the spool file's fd,
then {size, end} whenever either changes.
"""

import binascii
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from sandbox_gateway.boxd.command_launch import StartRequest
from sandbox_gateway.boxd.processes import Process
from sandbox_gateway.boxd.protocol import (
    MAX_MESSAGE_BYTES,
    BoxFaultError,
    JsonMessage,
    encode_line,
    fault_message,
    report_exception,
    send_with_fds,
)

if TYPE_CHECKING:
    from sandbox_gateway.boxd.box_process import BoxProcess


class Connection:
    def __init__(self, box: "BoxProcess", connection: socket.socket, selector: selectors.BaseSelector) -> None:
        connection.setblocking(False)
        self._box = box
        self._socket = connection
        self._selector = selector
        self._received = bytearray()
        self._outgoing = b""
        self._process: Process | None = None
        self._has_news = False
        selector.register(connection, selectors.EVENT_READ, self._on_event)

    def _on_event(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ and self._socket.fileno() >= 0:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._received) > MAX_MESSAGE_BYTES:
            self._close()
            return
        self._received += data
        if self._received.endswith(b"\n"):
            request = json.loads(self._received)
            self._received = bytearray()
            self._answer(request)

    def _answer(self, request: JsonMessage) -> None:
        try:
            operation = _OPERATIONS.get(request["op"])
            if request["op"] in ("start", "attach"):
                self._follow(request)
            elif request["op"] == "dial":
                with self._box.dial(request["port"]) as connection:
                    send_with_fds(self._socket, {}, [connection.fileno()])
            elif operation is None:
                raise BoxFaultError("unimplemented", f"unknown operation {request['op']}")
            else:
                self._send(operation(self._box, request) or {})
        except BoxFaultError as error:
            self._send(fault_message(error.code, error.message))
        except OSError as error:
            report_exception()
            self._send(fault_message("unavailable", str(error)))

    def _follow(self, request: JsonMessage) -> None:
        table = self._box.processes
        if request["op"] == "attach":
            process = table.find(request["pid"], request["tag"])
        elif self._box.frozen:  # a new process would be frozen before its exec, and boxd would wait for it
            raise BoxFaultError("failed_precondition", "the box is paused")
        else:
            process = table.start(StartRequest.from_message(request))
        spool = os.open(process.spool_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            send_with_fds(self._socket, {"pid": process.pid, "size": process.size, "end": process.end}, [spool])
        except OSError:
            self._close()
            return
        finally:
            os.close(spool)
        self._process = process
        process.listeners.add(self._on_news)

    def _on_news(self) -> None:
        """Queue only the newest size and end, so that a slow reader costs no memory."""
        self._has_news = True
        self._flush()

    def _send(self, message: JsonMessage) -> None:
        self._outgoing += encode_line(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing or self._has_news:
                if not self._outgoing and self._process is not None:
                    self._outgoing = encode_line({"size": self._process.size, "end": self._process.end})
                    self._has_news = False
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
            self._selector.modify(self._socket, selectors.EVENT_READ, self._on_event)
        except BlockingIOError:
            self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_event)
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.listeners.discard(self._on_news)
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()


def _list(box: "BoxProcess", _request: JsonMessage) -> JsonMessage:
    rows = []
    for process in box.processes.running():
        asked = process.request
        row = {"cmd": asked.command, "args": asked.args, "envs": asked.env, "cwd": asked.cwd}
        rows.append({"pid": process.pid, "tag": asked.tag, **row})
    return {"processes": rows}


def _running(box: "BoxProcess", request: JsonMessage) -> Process:
    return box.processes.find_running(request["pid"], request["tag"])


_Operation = Callable[["BoxProcess", JsonMessage], JsonMessage | None]
_OPERATIONS: dict[str, _Operation] = {
    "list": _list,
    "signal": lambda box, asked: box.processes.send_signal(_running(box, asked), signal.Signals(asked["signal"])),
    "input": lambda box, asked: box.processes.write_stdin(_running(box, asked), binascii.a2b_base64(asked["data"])),
    "resize": lambda box, asked: box.processes.resize(_running(box, asked), (asked["size"][0], asked["size"][1])),
    "close_stdin": lambda box, asked: box.processes.close_stdin(_running(box, asked)),
    "deadline": lambda box, request: box.set_deadline(request["deadline"]),
    "freeze": lambda box, request: box.freeze(request["frozen"]),
    "ping": lambda _box, _request: {"pid": os.getpid()},
    "destroy": lambda box, _request: box.shut_down(),
}
