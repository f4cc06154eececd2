"""Start one command inside the box: fork, enter its namespaces, change to its user, exec. The code between fork and
exec runs with the rights of the host's root, so it is short and its order matters."""

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sandbox_gateway.boxd import linux_calls, seccomp
from sandbox_gateway.boxd.cgroups import Cgroup
from sandbox_gateway.boxd.namespaces import ALL_KINDS, Namespaces, change_user
from sandbox_gateway.boxd.protocol import BoxFaultError, BoxSpec, JsonMessage
from sandbox_gateway.boxd.users import BoxUser, find_user, resolve_path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH_KEEPER = "RATCHET_PATH"
"""A login shell resets PATH; the images' profile restores it from this variable."""
_RESERVED_PROCESSES, _FILES_PER_PROCESS = 32, 4096
_TERMINAL_SENT = b"t"


@dataclass(frozen=True, slots=True)
class StartRequest:
    command: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    user: str
    wants_stdin: bool
    tag: str
    timeout_seconds: float
    """0 means no limit."""
    terminal: tuple[int, int] | None = None
    """(rows, columns) of a terminal that replaces stdin, stdout and stderr; None: pipes."""

    @classmethod
    def from_message(cls, message: JsonMessage) -> "StartRequest":
        values = {one.name: message[one.name] for one in fields(cls) if one.name != "terminal"}
        return cls(**values, terminal=tuple(message["terminal"]) if message.get("terminal") else None)


@dataclass(frozen=True, slots=True)
class Launched:
    """`outputs` maps an fd to read to its stream in the spool (1 stdout, 2 stderr, 3 terminal)."""

    host_pid: int
    box_pid: int
    outputs: dict[int, int]
    stdin: int | None
    terminal: int | None = None


def launch(request: StartRequest, spec: BoxSpec, namespaces: Namespaces, cgroup: Cgroup) -> Launched:
    """Return once the command has been exec'd. The calling thread is in the box's pid namespace, so the child is, too.
    Raises BoxFaultError with the reason: unknown user, missing directory or no such program."""
    ours, theirs = socket.socketpair()
    pipes = _Pipes.none() if request.terminal else _Pipes.make(request.wants_stdin)
    pid = os.fork()
    if pid == 0:
        _become(request, spec, namespaces, cgroup, pipes.theirs, theirs)
    theirs.close()
    pipes.close_theirs()
    report, received, _flags, _address = socket.recv_fds(ours, 65_536, 1)
    if report == _TERMINAL_SENT:
        report = ours.recv(65_536)
    ours.close()
    if report:
        os.waitpid(pid, 0)
        pipes.close_ours()
        for fd in received:
            os.close(fd)
        code, message = json.loads(report)
        raise BoxFaultError(code, message)
    box_pid = _pid_in_box(pid)
    if received:
        (terminal,) = received
        os.set_inheritable(terminal, False)
        return Launched(pid, box_pid, {terminal: 3}, os.dup(terminal), terminal)
    return Launched(pid, box_pid, {pipes.out_read: 1, pipes.err_read: 2}, pipes.in_write)


@dataclass(slots=True)
class _Pipes:
    """The pipes of a command without a terminal; -1 and None mean absent."""

    theirs: tuple[int, ...]
    out_read: int
    err_read: int
    in_write: int | None

    @classmethod
    def none(cls) -> "_Pipes":
        return cls((), -1, -1, None)

    @classmethod
    def make(cls, wants_stdin: bool) -> "_Pipes":
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        for fd in (out_write, err_write):  # so that any user of the box can open /dev/stdout
            os.fchmod(fd, 0o666)
        in_read, in_write = os.pipe() if wants_stdin else (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), None)
        return cls((in_read, out_write, err_write), out_read, err_read, in_write)

    def close_theirs(self) -> None:
        for fd in self.theirs:
            os.close(fd)

    def close_ours(self) -> None:
        for fd in (self.out_read, self.err_read, self.in_write):
            if fd is not None and fd >= 0:
                os.close(fd)


def _become(
    request: StartRequest,
    spec: BoxSpec,
    namespaces: Namespaces,
    cgroup: Cgroup,
    stdio: tuple[int, ...],
    report: socket.socket,
) -> None:
    """Run in the child; never returns."""
    try:
        linux_calls.make_undumpable()  # until exec it holds boxd's memory and fds, and the box can see it
        cgroup.join()
        namespaces.enter(ALL_KINDS)
        user = find_user(request.user or spec.default_user, spec.num_ids)
        if request.terminal is not None:
            stdio = _open_terminal(request.terminal, user, spec.num_ids, report)
        linux_calls.drop_capabilities()
        _limit(spec)
        seccomp.apply()
        _change_user(user, spec.num_ids)
        os.setsid()
        _change_directory(request.cwd or spec.workdir, user)
        for target, source in enumerate(stdio):
            os.dup2(source, target)
        if request.terminal is not None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _reset_signals()
        environment = _environment(request.env, spec, user)
        os.execvpe(request.command, [request.command, *request.args], environment)
    except BoxFaultError as error:
        report.sendall(json.dumps([error.code, error.message]).encode())
    except (OSError, ValueError) as error:
        report.sendall(json.dumps(["invalid_argument", f"cannot run {request.command[:200]!r}: {error}"]).encode())
    finally:
        os._exit(127)


def _open_terminal(size: tuple[int, int], user: BoxUser, num_ids: int, report: socket.socket) -> tuple[int, int, int]:
    """Open a terminal from the box's own /dev/ptmx, so that it is under its /dev/pts; boxd gets the other end."""
    change_user(num_ids)  # the terminal is owned by its creator, and the host's root has no id in the box
    controller, terminal = os.openpty()
    os.fchown(terminal, user.uid, -1)
    set_terminal_size(controller, size)
    socket.send_fds(report, [_TERMINAL_SENT], [controller])
    os.close(controller)
    return terminal, terminal, terminal


def set_terminal_size(terminal: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _limit(spec: BoxSpec) -> None:
    """Limit each user below the box's limit, so that root can still start a process that ends a fork bomb. Without
    control groups, each process has the memory limit of the box for its data, and boxd looks at its open files."""
    limits = {resource.RLIMIT_NPROC: spec.max_processes - _RESERVED_PROCESSES}
    if not spec.cgroup:
        limits |= {resource.RLIMIT_DATA: spec.memory_bytes, resource.RLIMIT_NOFILE: _FILES_PER_PROCESS}
    for kind, limit in limits.items():
        _soft, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _change_user(user: BoxUser, num_ids: int) -> None:
    change_user(num_ids)  # only a change from the box's own root to a user takes its capabilities away before the exec
    change_user(num_ids, user.uid, user.gid, user.groups)
    if user.uid != 0:
        linux_calls.forbid_new_privileges()


def _reset_signals() -> None:
    """Take nothing over of what this process, or the one that has started the gateway, ignores or blocks."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _change_directory(wanted: str, user: BoxUser) -> None:
    path = resolve_path(wanted, user)
    try:
        os.chdir(path)
    except OSError as error:
        if wanted in ("", "~") and isinstance(error, FileNotFoundError):  # a user without a home
            return os.chdir("/")
        raise BoxFaultError("invalid_argument", f"cwd '{path}' cannot be entered: {error.strerror}") from error


def _environment(wanted: Mapping[str, str], spec: BoxSpec, user: BoxUser) -> dict[str, str]:
    base = {"PATH": SYSTEM_PATH, "HOME": user.home, "USER": user.name, "LOGNAME": user.name, "LANG": "C.UTF-8"}
    environment = {**base, **spec.env, **wanted}
    if "PATH" not in wanted:
        environment["PATH"] = ":".join([environment["PATH"], *spec.extra_path])
    environment[PATH_KEEPER] = environment["PATH"]
    return environment


def _pid_in_box(host_pid: int) -> int:
    """Return the pid as the box sees it, so that `kill <pid>` inside agrees with the pid that the SDK reports."""
    with open(f"/proc/{host_pid}/status") as status:
        for line in status:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    raise BoxFaultError("internal", "this kernel does not report pids per namespace")
