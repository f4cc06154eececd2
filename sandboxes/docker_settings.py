"""Settings of the Docker back end from the environment, and the label that marks boxes with egress. Workers, `ratchet
part egress` and `ratchet up` read the same values here. This module imports no Docker client."""

import os
from collections.abc import Mapping

EGRESS_LABEL = "ratchet_egress"
"""Label of a box that can reach the adapter; its value is the adapter's address as `ratchet part egress` reaches it."""


def is_chosen() -> bool:
    return os.environ.get("RATCHET_SANDBOX_PROVIDER") == "docker"


def own_network() -> str | None:
    """Return the user's own network; None: `ratchet part egress` gives boxes without network the adapter's port."""
    return os.environ.get("RATCHET_DOCKER_NETWORK") or None


def needs_egress() -> bool:
    """Return whether boxes need `ratchet part egress` to reach the adapter."""
    return is_chosen() and own_network() is None


def adapter_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return host:port of the adapter, as this machine reaches it."""
    return f"{environment.get('ADAPTER_PUBLIC_HOST') or '127.0.0.1'}:{environment.get('ADAPTER_PORT') or '18001'}"
