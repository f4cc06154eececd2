"""The protocol between gateway and boxd: one JSON line per message over a unix socket, with fds beside it. Both ends
share the boot specification, the fault class and the framing. Standard library only."""

import json
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

JsonMessage = dict[str, Any]
"""One decoded JSON object. Its keys depend on `op`; see `control_socket.py` and `file_helper.py`."""

CONTROL_SOCKET = "ctl.sock"
FILES_SOCKET = "fs.sock"
MAX_MESSAGE_BYTES = 66 << 20


def clock() -> float:
    """Seconds of CLOCK_BOOTTIME, for every deadline: it cannot be set, runs in suspension, and boxes end at boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def report_exception() -> None:
    """Write the current exception to boxd's log by the interpreter's hook: logging would cost every box memory."""
    sys.excepthook(*sys.exc_info())


class BoxFaultError(Exception):
    """A refusal that reaches the caller as a Connect code (`not_found`, `invalid_argument`, …) and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """Everything boxd needs to boot one box; stored under `spec` in box.json and never changed."""

    box_id: str
    uid_base: int
    """First of the box's ids, as boxd sees them."""
    num_ids: int
    shares_ids: bool
    """Another box may have the same ids."""
    cgroup: str
    """Path below the cgroup mount, `<gateway>/<box>`; empty if the machine has none that we may write."""
    memory_bytes: int
    max_processes: int
    egress_ports: list[int]
    ttl_seconds: float
    """The box ends itself `grace_seconds` after so long from the end of its boot; a `deadline` message changes it."""
    grace_seconds: float
    default_user: str
    workdir: str
    """Working directory of commands whose caller names none; empty means the user's home."""
    env: dict[str, str]
    binds: list[tuple[str, str]]
    """(host source, box target), mounted read-only in this order."""
    links: dict[str, str]
    """Symbolic links of the root directory: box path to target."""
    owned_directories: list[tuple[str, int, int]]
    """(box path, box uid, mode) of the private writable directories; parents come first."""
    lower: str | None = None
    """An image directory to use as the lower layer of an overlay; None means an empty root that only binds fill."""
    copies_image: bool = False
    """The box has a copy of `lower` instead, because overlays cannot be mounted here."""
    disk_template: str = ""
    """An empty file system of which the box's private disk is a copy; empty means the directory's own disk without a
    limit.
    """
    disk_bytes: int = 0
    extra_path: list[str] = field(default_factory=list)
    """Directories appended to every command's PATH."""


def encode_line(message: JsonMessage) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def fault_message(code: str, message: str) -> JsonMessage:
    return {"fault": [code, message]}


def receive_line(connection: socket.socket) -> bytes:
    """Read one line, blocking; empty if the peer has closed. Raises BoxFaultError if the line exceeds the limit."""
    with connection.makefile("rb") as file:
        line = file.readline(MAX_MESSAGE_BYTES + 1)
    if len(line) > MAX_MESSAGE_BYTES:
        raise BoxFaultError("invalid_argument", f"request is larger than {MAX_MESSAGE_BYTES} bytes")
    return line if line.endswith(b"\n") else b""


def send_with_fds(connection: socket.socket, message: JsonMessage, fds: list[int]) -> None:
    if fds:
        socket.send_fds(connection, [encode_line(message)], fds)
    else:
        connection.sendall(encode_line(message))
