"""A sandbox gateway without a stack, for benchmarks and dataset generators; it and its boxes end with the block."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from ratchet import paths
from ratchet.errors import MachineError
from sandbox_gateway import machine_probe
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, ensure_python_layer
from sandbox_gateway.settings import GatewaySettings
from sandboxes.e2b import E2BProvider
from stack.ports import free_port

_SERVE = (
    "import sys; from sandbox_gateway.serve import serve_gateway;"
    "from sandbox_gateway.settings import GatewaySettings;"
    "serve_gateway(GatewaySettings.model_validate_json(sys.argv[1]))"
)
_START_SECONDS = 600.0
_END_SECONDS = 120.0


@contextlib.contextmanager
def private_gateway(directory: Path, max_boxes: int = 16) -> Iterator[E2BProvider]:
    """Yield a provider of boxes with files in `directory`. Raises MachineError if this machine cannot run boxes."""
    machine_probe.require_sandbox_support()
    settings = GatewaySettings(
        root_directory=directory,
        api_key="e2b_" + secrets.token_hex(20),
        port=free_port(),
        max_boxes=max_boxes,
        images_directory=paths.images(),
        layers={PYTHON_LAYER_PATH: ensure_python_layer(paths.cache())},
        hidden_directories=(Path.cwd(),),
    )
    url = f"http://127.0.0.1:{settings.port}"
    # Its log goes to stderr, because a benchmark prints only its result on stdout.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVE, settings.model_dump_json()],
        start_new_session=True,
        stdout=sys.stderr.fileno(),
    )
    try:
        _wait_for(process, url)
        try:
            yield E2BProvider(settings.api_key, url, url)
        finally:
            _end_boxes(url, settings.api_key)
    finally:
        process.terminate()
        process.wait(_END_SECONDS)


def _wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > until:
            raise MachineError("the sandbox gateway does not start; `ratchet doctor` shows what is missing")
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/health", trust_env=False)
            return
        time.sleep(0.05)


def _end_boxes(url: str, api_key: str) -> None:
    with httpx.Client(base_url=url, headers={"X-API-KEY": api_key}, trust_env=False, timeout=_END_SECONDS) as client:
        for row in client.get("/v2/sandboxes").raise_for_status().json():
            client.delete(f"/sandboxes/{row['sandboxID']}")
