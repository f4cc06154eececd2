"""A sandbox gateway without a stack, for benchmarks; it and its boxes end with the block."""

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from ratchet import paths
from ratchet.errors import MachineError
from sandbox_gateway import machine_probe
from sandbox_gateway.front import host_tag
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, ensure_python_layer
from sandbox_gateway.settings import GatewaySettings
from sandboxes.e2b import E2BProvider
from stack.ports import free_port
from tests.network_hosts import NetworkHost

SERVE_GATEWAY = (
    "import sys; from sandbox_gateway.serve import serve_gateway;"
    "from sandbox_gateway.settings import GatewaySettings;"
    "serve_gateway(GatewaySettings.model_validate_json(sys.argv[1]))"
)
"""Program of a gateway; its argument: the settings as JSON."""
_SERVE_FRONT = (
    "import sys; from pathlib import Path; from sandbox_gateway.front import create_front_app;"
    "from sandbox_gateway.serve import serve_app;"
    "serve_app(create_front_app(Path(sys.argv[1]), 600.0), '127.0.0.1', int(sys.argv[2]))"
)
_START_SECONDS = 600.0
_END_SECONDS = 120.0


@contextlib.contextmanager
def private_gateway(
    directory: Path, max_boxes: int = 16, host: NetworkHost | None = None, key: str | None = None
) -> Iterator[E2BProvider]:
    """Yield a provider of boxes with files in `directory`; with `host` the gateway runs there, behind a front that has
    this `key`. Raises MachineError if this machine cannot run boxes."""
    machine_probe.require_sandbox_support()
    settings = GatewaySettings(
        root_directory=directory,
        api_key=key or "e2b_" + secrets.token_hex(20),
        host="127.0.0.1" if host is None else host.address,
        port=free_port(),
        max_boxes=max_boxes,
        box_id_prefix="" if host is None else host_tag(host.address),
        images_directory=paths.images(),
        layers={PYTHON_LAYER_PATH: ensure_python_layer(paths.cache())},
        hidden_directories=(Path.cwd(),),
    )
    url = f"http://{settings.host}:{settings.port}"
    command = [sys.executable, "-P", "-c", SERVE_GATEWAY, settings.model_dump_json()]
    with _serving(command if host is None else host.inside(*command), url):
        try:
            yield E2BProvider(settings.api_key, url, url)
        finally:
            _end_boxes(url, settings.api_key)


@contextlib.contextmanager
def private_front(directory: Path, hosts: Sequence[NetworkHost], max_boxes: int) -> Iterator[E2BProvider]:
    """Yield a provider of the boxes of gateways on the hosts, behind a front."""
    key, port, file = "e2b_" + secrets.token_hex(20), free_port(), directory / "hosts.json"
    with contextlib.ExitStack() as ended:
        made = {
            host.address: ended.enter_context(private_gateway(directory / host.address, max_boxes, host, key))
            for host in hosts
        }
        file.write_text(json.dumps({name: provider.url for name, provider in made.items()}))
        url = f"http://127.0.0.1:{port}"
        ended.enter_context(_serving([sys.executable, "-P", "-c", _SERVE_FRONT, str(file), str(port)], url))
        yield E2BProvider(key, url, url)


@contextlib.contextmanager
def _serving(command: list[str], url: str) -> Iterator[None]:
    # Its log goes to stderr, because a benchmark prints only its result on stdout.
    process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr.fileno())
    try:
        _wait_for(process, url)
        yield
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
