"""What the environment says of Docker, and the one label that provider and egress agree upon.

Why here: workers make boxes, `ratchet egress` gives them their way out, `ratchet up` decides whether it starts that;
all read the same. Called by: `docker.py`, `stack.worker`, `stack.docker_egress`, `stack.parts`. Imports no Docker
client. """

import os
from collections.abc import Mapping

EGRESS_LABEL = "ratchet_egress"
"""On a box that has a way to the adapter: the adapter's address, as `ratchet egress` reaches it."""


def is_chosen() -> bool:
    """Whether boxes are containers."""
    return os.environ.get("RATCHET_SANDBOX_PROVIDER") == "docker"


def own_network() -> str | None:
    """A network of the user's own, with whatever it reaches; None: boxes have no network, and `ratchet egress` opens
    the adapter's port."""
    return os.environ.get("RATCHET_DOCKER_NETWORK") or None


def needs_egress() -> bool:
    return is_chosen() and own_network() is None


def adapter_address(environment: Mapping[str, str] = os.environ) -> str:
    """host:port, as this machine reaches the adapter."""
    return f"{environment.get('ADAPTER_PUBLIC_HOST') or '127.0.0.1'}:{environment.get('ADAPTER_PORT') or '18001'}"
