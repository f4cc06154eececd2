"""Find the listener on a port of this stack: a leftover of an earlier life of the stack, or another program.

A listener is the stack's if its environment has the stack's mark, or if its command line or one of its open files lies
in a directory of the stack: some programs overwrite their environment and their command line with their title.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ratchet.errors import MachineError
from stack.ports import is_free

# Marks every process that this stack starts, so that `up` finds leftovers of a crash and touches no other process.
MARK = "RATCHET_STACK"

_END_SECONDS = 10.0
_FREE_SECONDS = 60.0
_MAX_COMMAND_CHARS = 100


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
