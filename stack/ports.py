"""Choose free ports below the range from which the kernel picks source ports.

A port that the kernel hands out (`bind` to 0) can become a connection's source port a moment later; a part that
restarts hours later would then find its own port taken.
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
    """Return a port that is free, not in `taken`, and not returned by this process before."""
    while True:
        port = random.SystemRandom().randrange(_LOWEST, max(_first_ephemeral(), _LOWEST + 1000))
        if port not in _given and port not in taken and is_free(port):
            _given.add(port)
            return port


def _first_ephemeral() -> int:
    return int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.is_file() else _USUAL_EPHEMERAL
