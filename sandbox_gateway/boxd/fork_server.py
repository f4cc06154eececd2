"""The small process that boxd processes are forked from: a warm interpreter makes a boot 50 ms cheaper.

Why here: forking the gateway itself would copy its memory and its open connections into every box.
Called by: `boot.py` of the gateway, as `python -I -S`; it ends when the gateway's end of its socket closes.
"""

import array
import contextlib
import encodings.idna
import encodings.utf_8  # noqa: F401
import gc
import json
import os
import signal
import socket
import struct
import sys

from sandbox_gateway.boxd import box_process

_MAX_REQUEST_BYTES = 4096
LOG_FILE = "boxd.log"


def run_fork_server(control_fd: int, bubblewrap: str) -> None:
    """Serves boot requests: a message is the box's directory, with the socket for the answer beside it."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        request, ancillary, _flags, _address = control.recvmsg(
            _MAX_REQUEST_BYTES, socket.CMSG_SPACE(struct.calcsize("i"))
        )
        if not request:
            return
        with socket.socket(fileno=_only_fd(ancillary)) as report:
            try:
                child = os.fork()
            except OSError as error:  # no memory or no process left just now: this boot fails, the next may not
                with contextlib.suppress(OSError):
                    report.sendall(json.dumps({"error": f"fork: {error}"}).encode())
                continue
            if child == 0:
                control.close()
                _become_boxd(os.fsdecode(request), report, bubblewrap)


def _become_boxd(directory: str, report: socket.socket, bubblewrap: str) -> None:
    """Runs in the child and never returns. A session of its own keeps the gateway's signals away."""
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


def _only_fd(ancillary: list[tuple[int, int, bytes]]) -> int:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data)
    (fd,) = fds
    os.set_inheritable(fd, False)
    return fd
