"""Ports for servers of ours that nobody else takes between the choice and the bind.

Why here: a port that the kernel hands out (`bind` to 0) may be some connection's source port a moment later, and a part that starts anew
hours later then finds its own port taken; so these come from below the range from which the kernel picks.
Called by: `stack.py`, `private_gateway.py`, and tests and benchmarks that start servers.
"""

import random
import socket
from collections.abc import Collection
from pathlib import Path

_LOWEST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = 32_768

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
    """One that nobody listens on, that is not among `taken`, and that this process has not been given before."""
    while True:
        port = random.SystemRandom().randrange(_LOWEST, max(_first_ephemeral(), _LOWEST + 1000))
        if port not in _given and port not in taken and is_free(port):
            _given.add(port)
            return port


def _first_ephemeral() -> int:
    return int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.is_file() else _USUAL_EPHEMERAL
