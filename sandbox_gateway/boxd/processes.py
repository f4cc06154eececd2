"""The box's process table: output spooled to a file from byte 0, exit codes, time limits, stdin. A second client can
attach at any time and read everything from the start, whether or not another client listens."""

import contextlib
import os
import selectors
import signal
import struct
from collections.abc import Callable
from functools import partial

from sandbox_gateway.boxd.cgroups import Cgroup
from sandbox_gateway.boxd.command_launch import Launched, StartRequest, launch, set_terminal_size
from sandbox_gateway.boxd.namespaces import Namespaces
from sandbox_gateway.boxd.protocol import BoxFaultError, BoxSpec, JsonMessage, clock

SPOOL_DIRECTORY = "spool"
FRAME = struct.Struct(">BI")
"""A spool file is a sequence of frames (stream, length) and that many bytes; stream 1 is stdout, 2 stderr, 3 a
terminal.
"""
_MAX_SPOOL_BYTES = 256 << 20
_MAX_KEPT_BYTES = 1 << 30
"""Limit for the spools of all ended commands together; the oldest are deleted first."""
_MAX_STDIN_BYTES = 64 << 20
_NUM_KEPT_ENDED = 1000
_LINGER_SECONDS = 1.0
"""The time for reading output after the main process ended, if a child of it (`server &`) keeps the pipes open."""
_READ_BYTES = 65_536


class Process:
    """One command and its state. `end` is the Connect end event, None while it runs. `lost_output`: why some of its
    output could not be spooled; empty if all was."""

    def __init__(self, request: StartRequest, launched: Launched, spool_path: str) -> None:
        self.request = request
        self.pid = launched.box_pid
        self.host_pid = launched.host_pid
        self.spool_path = spool_path
        self.spool = os.open(spool_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.outputs = dict(launched.outputs)
        self.stdin = launched.stdin
        self.terminal = launched.terminal
        self.stdin_pending = bytearray()
        self.stdin_closing = False
        self.pidfd = os.pidfd_open(launched.host_pid)
        self.kill_at = clock() + request.timeout_seconds if request.timeout_seconds else None
        self.timed_out = False
        self.is_killed = False
        self.lost_output = ""
        self.wait_status: int | None = None
        self.linger_until: float | None = None
        self.end: JsonMessage | None = None
        self.listeners: set[Callable[[], None]] = set()

    def notify(self) -> None:
        for listener in list(self.listeners):
            listener()

    def append(self, stream: int, data: bytes) -> None:
        """Spool output, up to the limit, at which the command is to be killed. Raises OSError if the disk is full; the
        spool then ends before `data`."""
        if self.size >= _MAX_SPOOL_BYTES:
            return
        self._write_frame(stream, data)
        if self.size >= _MAX_SPOOL_BYTES:
            words = f"output ends here, and the command was killed: the limit of {_MAX_SPOOL_BYTES} bytes is reached"
            self._write_frame(2, f"\n[{words}]\n".encode())

    @property
    def is_full(self) -> bool:
        return self.size >= _MAX_SPOOL_BYTES

    def _write_frame(self, stream: int, data: bytes) -> None:
        frame = memoryview(FRAME.pack(stream, len(data)) + data)
        position = self.size
        while frame:  # a disk that is almost full takes a part
            written = os.pwrite(self.spool, frame, position)
            position += written
            frame = frame[written:]
        self.size = position


class ProcessTable:
    def __init__(self, spec: BoxSpec, namespaces: Namespaces, cgroup: Cgroup, selector: selectors.BaseSelector) -> None:
        self._spec = spec
        self._namespaces = namespaces
        self._cgroup = cgroup
        self._selector = selector
        self._by_pid: dict[int, Process] = {}
        self._num_started = 0
        os.makedirs(SPOOL_DIRECTORY, exist_ok=True)

    def start(self, request: StartRequest) -> Process:
        launched = self._namespaces.within("pid", lambda: launch(request, self._spec, self._namespaces, self._cgroup))
        self._num_started += 1
        process = Process(request, launched, f"{SPOOL_DIRECTORY}/{self._num_started}")
        self._forget(launched.box_pid)
        self._by_pid[process.pid] = process
        for fd in process.outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, partial(self._read_output, process, fd))
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda _events: self._on_exit(process))
        if process.stdin is not None:
            os.set_blocking(process.stdin, False)
        return process

    def find(self, pid: int, tag: str) -> Process:
        if pid in self._by_pid:
            return self._by_pid[pid]
        for process in self._by_pid.values():
            if tag and process.request.tag == tag:
                return process
        raise BoxFaultError("not_found", f"process with {f'tag {tag}' if tag else f'pid {pid}'} not found")

    def find_running(self, pid: int, tag: str) -> Process:
        """Return a process that lives. Of several calls that kill it, one finds it."""
        process = self.find(pid, tag)
        if process.is_killed or process.wait_status is not None:
            raise BoxFaultError("not_found", f"process with pid {process.pid} has ended")
        return process

    def running(self) -> list[Process]:
        return [process for process in self._by_pid.values() if process.end is None]

    def send_signal(self, process: Process, number: int) -> None:
        """Signal the whole process group; a process that called setsid survives, which launchers rely on."""
        process.is_killed |= number == signal.SIGKILL
        if process.wait_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.host_pid, number)

    def write_stdin(self, process: Process, data: bytes) -> None:
        if process.stdin is None or process.stdin_closing:
            raise BoxFaultError("failed_precondition", "stdin is not open")
        if len(process.stdin_pending) + len(data) > _MAX_STDIN_BYTES:
            raise BoxFaultError("resource_exhausted", f"more than {_MAX_STDIN_BYTES} bytes of stdin would be unread")
        process.stdin_pending += data
        self._flush_stdin(process)

    def resize(self, process: Process, size: tuple[int, int]) -> None:
        if process.terminal is None or process.terminal not in process.outputs:
            raise BoxFaultError("failed_precondition", "the process has no terminal")
        set_terminal_size(process.terminal, size)

    def close_stdin(self, process: Process) -> None:
        process.stdin_closing = True
        self._flush_stdin(process)

    def next_deadline(self) -> float:
        """Return the time of the next limit by `clock`, or infinity."""
        times = [at for process in self.running() for at in (process.kill_at, process.linger_until) if at is not None]
        return min(times, default=float("inf"))

    def enforce_deadlines(self, now: float) -> None:
        for process in self.running():
            if process.kill_at is not None and now >= process.kill_at and process.wait_status is None:
                process.timed_out = True
                process.kill_at = None
                self.send_signal(process, signal.SIGKILL)
            if process.linger_until is not None and now >= process.linger_until:
                words = "output ends here: a child of the command holds it open; redirect what it prints"
                self._append(process, 2, f"\n[{words}]\n".encode())
                self._finish(process)

    def wait_for_all(self) -> None:
        """Reap every child after the box was killed, so that its control group is empty."""
        for process in self._by_pid.values():
            if process.wait_status is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.host_pid, 0)

    def _read_output(self, process: Process, fd: int, _events: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last program has closed the terminal
            data = b""
        if data:
            self._append(process, process.outputs[fd], data)
        else:
            self._close_output(process, fd)
            self._finish_if_complete(process)

    def _append(self, process: Process, stream: int, data: bytes) -> None:
        """Spool output and tell the listeners. If some is lost, end the command: the rest must not pass for all."""
        if process.lost_output:
            return
        try:
            process.append(stream, data)
            if process.is_full:
                self.send_signal(process, signal.SIGKILL)
        except OSError as error:
            process.lost_output = error.strerror or str(error)
            self.send_signal(process, signal.SIGKILL)
        process.notify()

    def _close_output(self, process: Process, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        del process.outputs[fd]

    def _on_exit(self, process: Process) -> None:
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        _, process.wait_status = os.waitpid(process.host_pid, 0)
        process.linger_until = clock() + _LINGER_SECONDS
        process.kill_at = None
        process.stdin_pending.clear()
        self.close_stdin(process)
        self._finish_if_complete(process)

    def _finish_if_complete(self, process: Process) -> None:
        if process.wait_status is not None and not process.outputs and process.end is None:
            self._finish(process)

    def _finish(self, process: Process) -> None:
        for fd in list(process.outputs):
            self._close_output(process, fd)
        os.close(process.spool)
        process.end = _end_event(process)
        process.linger_until = None
        process.notify()
        ended = [other for other in self._by_pid.values() if other.end is not None]
        kept_bytes = sum(other.size for other in ended)
        for number, other in enumerate(ended[:-1]):  # the process that just ended is kept
            if len(ended) - number <= _NUM_KEPT_ENDED and kept_bytes <= _MAX_KEPT_BYTES:
                break
            kept_bytes -= other.size
            self._forget(other.pid)

    def _forget(self, pid: int) -> None:
        process = self._by_pid.pop(pid, None)
        if process is not None:
            os.unlink(process.spool_path)

    def _flush_stdin(self, process: Process) -> None:
        if process.stdin is None:
            return
        try:
            while process.stdin_pending:
                written = os.write(process.stdin, process.stdin_pending)
                del process.stdin_pending[:written]
        except BlockingIOError:
            if process.stdin not in self._selector.get_map():
                self._selector.register(process.stdin, selectors.EVENT_WRITE, lambda _: self._flush_stdin(process))
            return
        except BrokenPipeError:
            process.stdin_pending.clear()
            process.stdin_closing = True
        if process.stdin in self._selector.get_map():
            self._selector.unregister(process.stdin)
        if process.stdin_closing:
            os.close(process.stdin)
            process.stdin = None


def _end_event(process: Process) -> JsonMessage:
    status = process.wait_status
    assert status is not None, "a process ends once, after it was waited for"
    code, timed_out = -1, process.timed_out
    if process.lost_output:
        words, timed_out = f"its output cannot be kept: {process.lost_output}", False
    elif os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        words = f"exit status {code}"
    else:
        words = f"signal: {(signal.strsignal(os.WTERMSIG(status)) or 'unknown').lower()}"
    return {
        "exitCode": code,
        "exited": code >= 0,
        "status": words,
        "timedOut": timed_out,
        **({"error": words} if code else {}),
        **({"lostOutput": words} if process.lost_output else {}),
    }
