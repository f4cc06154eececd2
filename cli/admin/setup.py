"""`ratchet admin setup`: install what the stack needs on this machine beside the Python environment."""

import os
import shutil
import subprocess

from cli.console import say
from ratchet import paths
from stack.parts import Stack
from stack.temporal_server import settle_temporal_kind


def setup() -> None:
    """Find or install bubblewrap, the Python layer of the boxes and the Temporal server. Idempotent."""
    from sandbox_gateway import machine_probe
    from sandbox_gateway.python_layer import ensure_python_layer

    if shutil.which("bwrap") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing bubblewrap")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=False, env=environment, capture_output=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "bubblewrap"], check=False, env=environment, capture_output=True
        )
    machine_probe.require_sandbox_support()
    say(f"python layer for boxes: {ensure_python_layer(paths.cache())}")
    if not Stack().is_external("TEMPORAL_ADDRESS"):  # last, because `make setup` has begun to build it
        say(f"temporal: {settle_temporal_kind(paths.home(), say)}")
