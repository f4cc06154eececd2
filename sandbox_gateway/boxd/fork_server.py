"""The small process from which boxd processes are forked: a warm interpreter makes a boot 50 ms faster.

Forking the gateway itself would copy its memory and open connections into every box. It runs as `python -I -S` and
ends when the gateway's end of its socket closes.
"""

import contextlib
import encodings.idna
import encodings.utf_8  # noqa: F401
import gc
import json
import os
import signal
import socket
import sys

from sandbox_gateway.boxd import box_process
from sandbox_gateway.boxd.id_modes import IdMode, enter_own_namespaces

_MAX_REQUEST_BYTES = 4096
LOG_FILE = "boxd.log"


def run_fork_server(control_fd: int, bubblewrap: str, mode: str) -> None:
    """Serve boot requests: each message is the box's directory, with the socket for the answer as fd."""
    enter_own_namespaces(IdMode(**json.loads(mode)))
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        request, fds, _flags, _address = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        if not request:
            return
        (fd,) = fds
        os.set_inheritable(fd, False)
        with socket.socket(fileno=fd) as report:
            try:
                child = os.fork()
            # no memory or no process is available now: this boot fails, the next one may succeed
            except OSError as error:
                with contextlib.suppress(OSError):
                    report.sendall(json.dumps({"error": f"fork: {error}"}).encode())
                continue
            if child == 0:
                control.close()
                _become_boxd(os.fsdecode(request), report, bubblewrap)


def _become_boxd(directory: str, report: socket.socket, bubblewrap: str) -> None:
    """Run in the child; never returns. A session of its own shields it from the gateway's signals."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(directory)
        log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for target in (1, 2):
            os.dup2(log, target)
        box_process.run_box(report, bubblewrap)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def remove_tree(path: str, mode: str) -> None:
    """Remove a tree whose files may have any id of a box, unlike this process's user."""
    from shutil import rmtree

    enter_own_namespaces(IdMode(**json.loads(mode)))
    rmtree(path, ignore_errors=True)
