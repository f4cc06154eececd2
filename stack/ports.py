"""Choose free ports below the range from which the kernel picks source ports, and free those of this stack.

A port that the kernel hands out (`bind` to 0) can become a connection's source port a moment later; a part that
restarts hours later would then find its own port taken.

A listener is the stack's if its environment has the stack's mark, or if its command line or one of its open files lies
in a directory of the stack: some programs overwrite their environment and their command line with their title.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from ratchet.errors import MachineError

_LOWEST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = 32_768
_END_SECONDS = 10.0
_FREE_SECONDS = 60.0
_MAX_COMMAND_CHARS = 100
# Marks every process that this stack starts, so that `up` finds leftovers of a crash and touches no other process.
MARK = "RATCHET_STACK"

_given: set[int] = set()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port(taken: Collection[int] = ()) -> int:
    """Return a port that is free, not in `taken`, and not returned by this process before."""
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.is_file() else _USUAL_EPHEMERAL
    while True:
        port = random.SystemRandom().randrange(_LOWEST, max(first_ephemeral, _LOWEST + 1000))
        if port not in _given and port not in taken and is_free(port):
            _given.add(port)
            return port


def has_mark(process: psutil.Process, home: Path) -> bool:
    """Return whether the process's environment has the stack's mark. Raises psutil.Error if that cannot be read."""
    return bool(process.environ().get(MARK) == str(home))


def _is_of_stack(process: psutil.Process, home: Path, directories: Sequence[Path]) -> bool:
    if has_mark(process, home):
        return True
    names = [*process.cmdline(), *(file.path for file in process.open_files())]
    return any(Path(name).is_relative_to(directory) for name in names for directory in directories)


def listener_of(port: int) -> psutil.Process | None:
    """Return the process that listens on the port; None if there is none, or if it is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", None) == port
            if listens and connection.pid:
                return psutil.Process(connection.pid)
    return None


def free_own_port(home: Path, name: str, port: int, directories: Sequence[Path] = ()) -> None:
    """End what an earlier life of this stack has left on its port, and wait until the port is free.

    `directories`: further directories with files of this stack. Raises MachineError, with process id and command, if
    the port is another program's.
    """
    deadline = time.monotonic() + _FREE_SECONDS
    while not is_free(port):
        process = listener_of(port)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not _is_of_stack(process, home, (home, *directories)) or process.pid == os.getpid():
                    raise MachineError(
                        f"port {port} ({name}) is used by another program, "
                        f"process {process.pid} ({_command(process)}); "
                        f"stop that program, or remove the line from {home / 'ports.json'}"
                    )
                _end(process)
        if time.monotonic() > deadline:
            raise MachineError(
                f"port {port} ({name}) is not free and its owner cannot be seen; "
                f"free it, or remove the line from {home / 'ports.json'}"
            )
        time.sleep(0.1)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:_MAX_COMMAND_CHARS] or process.name()
    except psutil.Error:
        return "unknown command"


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.terminate()
        _, alive = psutil.wait_procs([process], timeout=_END_SECONDS)
        for one in alive:
            one.kill()
