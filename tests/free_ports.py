"""Ports of test stacks."""

import json
from pathlib import Path

from stack.parts import PREFERRED_PORTS
from stack.ports import free_port


def free_ports(home: Path) -> None:
    """Write unused ports to `home`/ports.json, for test stacks that must not share a port with any other stack."""
    (home / "ports.json").write_text(json.dumps({name: free_port() for name in PREFERRED_PORTS}))
