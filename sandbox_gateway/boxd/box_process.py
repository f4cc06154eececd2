"""boxd, the process that owns one box: boots it, serves its sockets and ends it at its deadline.

It runs outside the box and in its own session, so boxes outlive the gateway and end without it. The fork server starts
it with the box's directory as working directory.
"""

import contextlib
import errno
import gc
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import TypeVar

from sandbox_gateway.boxd import namespaces
from sandbox_gateway.boxd.cgroups import cgroup_at
from sandbox_gateway.boxd.control_socket import Connection
from sandbox_gateway.boxd.egress import open_egress
from sandbox_gateway.boxd.file_helper import start_answer
from sandbox_gateway.boxd.processes import ProcessTable
from sandbox_gateway.boxd.protocol import CONTROL_SOCKET, FILES_SOCKET, BoxFaultError, BoxSpec, clock, report_exception
from sandbox_gateway.boxd.rootfs import assemble
from sandbox_gateway.boxd.tree_watch import TreeWatch

_T = TypeVar("_T")
_MAX_WAIT_SECONDS = 60.0
_DIAL_SECONDS = 2.0
_HOSTNAME = "box"


class BoxProcess:
    """State of one booted box. Everything runs on one thread with one selector."""

    def __init__(self, spec: BoxSpec, bubblewrap: str) -> None:
        self._spec = spec
        self.frozen = False
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._file_requests: set[int] = set()
        user_ns = namespaces.make_user_namespace(spec.uid_base, spec.num_ids)
        assemble(spec, user_ns)
        self._cgroup = cgroup_at(spec.cgroup)
        self._cgroup.create(spec.memory_bytes, spec.max_processes)
        self._namespaces = namespaces.start_namespaces(bubblewrap, _HOSTNAME, user_ns, spec, self._cgroup)
        self._watch: TreeWatch | None = None
        if not self._cgroup.directories:
            self._watch = TreeWatch(self._namespaces.init_pid, spec.memory_bytes, spec.max_processes)
        open_egress(spec.egress_ports, self._namespaces, self._selector)
        self.processes: ProcessTable = ProcessTable(spec, self._namespaces, self._cgroup, self._selector)
        # Only now: a gateway adopts a box that listens, and a boot can take long.
        self._control = _listen(CONTROL_SOCKET)
        self._files = _listen(FILES_SOCKET)
        self._deadline = clock() + spec.ttl_seconds

    def run(self) -> None:
        for listener, on_connect in ((self._control, self._on_connect), (self._files, self._on_file_request)):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, on_connect)
        ended = os.pidfd_open(self._namespaces.bwrap_pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda _events: self._end())
        while True:
            now = clock()
            due = min(self._deadline + self._spec.grace_seconds, self.processes.next_deadline())
            if self._watch is not None:
                due = min(due, self._watch.next_look)
            for key, events in self._selector.select(min(_MAX_WAIT_SECONDS, max(0.0, due - now))):
                self._handle(key.data, events)
            now = clock()
            self.processes.enforce_deadlines(now)
            if self._watch is not None:
                self._handle(self._watch.enforce, now)
            if now >= self._deadline + self._spec.grace_seconds:
                self._end()

    def set_deadline(self, deadline: float) -> None:
        self._deadline = deadline

    def freeze(self, frozen: bool) -> None:
        if not self._cgroup.can_freeze:
            raise BoxFaultError("failed_precondition", "this machine's control groups cannot freeze a box")
        self._cgroup.freeze(frozen)
        self.frozen = frozen

    def dial(self, port: int) -> socket.socket:
        """Connect to `port` on the box's own loopback. Raises BoxFaultError if no process listens there."""
        connection = self._namespaces.within("net", socket.socket)
        try:
            connection.settimeout(_DIAL_SECONDS)
            connection.connect(("127.0.0.1", port))
        except OSError as error:
            connection.close()
            raise BoxFaultError("not_found", f"port {port} is not open: {error}") from error
        return connection

    def shut_down(self) -> None:
        """End every process of the box and remove its control group. The gateway removes the directory."""
        if self.frozen:
            self.freeze(False)
        # bwrap itself is not killed: it ends once pid 1 and every process of the box has been reaped, and we wait for
        # that.
        for pid in (self._namespaces.init_pid, *self._file_requests):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.wait_for_all()
        for pid in (self._namespaces.bwrap_pid, *self._file_requests):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._cgroup.remove()
        self._ended = True

    def _end(self) -> None:
        if not self._ended:
            self.shut_down()
        os._exit(0)

    def _handle(self, callback: Callable[[_T], None], argument: _T) -> None:
        """Log any exception of a callback, because one failing request must not end the box."""
        try:
            callback(argument)
        except Exception:
            report_exception()

    def _on_connect(self, _events: int) -> None:
        connection, _ = self._control.accept()
        Connection(self, connection, self._selector)

    def _on_file_request(self, _events: int) -> None:
        connection, _ = self._files.accept()
        pid = start_answer(connection, self._namespaces)
        ended = os.pidfd_open(pid)
        self._file_requests.add(pid)

        def bury(_events: int) -> None:
            self._selector.unregister(ended)
            os.close(ended)
            os.waitpid(pid, 0)
            self._file_requests.discard(pid)

        self._selector.register(ended, selectors.EVENT_READ, bury)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


def run_box(report: socket.socket, bubblewrap: str) -> None:
    """Boot the box described by ./box.json, report the result on `report`, and serve the box until it ends."""
    try:
        with open("box.json") as record:
            spec = BoxSpec(**json.load(record)["spec"])
        supervisor = BoxProcess(spec, bubblewrap)
        gc.freeze()
        with contextlib.suppress(OSError):  # the gateway has ended; the next one adopts the box
            report.sendall(json.dumps({"pid": os.getpid()}).encode())
        report.close()
        supervisor.run()
    except BaseException as error:
        report_exception()
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = getattr(error, "code", "unavailable" if is_full else "internal")
        with contextlib.suppress(OSError):
            report.sendall(json.dumps({"error": str(error), "code": code}).encode())
        raise
