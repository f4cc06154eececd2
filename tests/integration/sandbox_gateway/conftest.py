"""A real gateway for the sandbox tests: a separate process on a free loopback port, with real boxes.

These tests are about processes that outlive each other, so the gateway cannot run inside pytest.
"""

import asyncio
import contextlib
import http.server
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ratchet import paths
from ratchet.errors import MachineError
from sandbox_gateway import machine_probe
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, ensure_python_layer
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.e2b import E2BProvider
from stack.ports import free_port
from tests.private_gateway import SERVE_GATEWAY

pytest.register_assert_rewrite("tests.integration.sandbox_gateway.contract")

API_KEY = "e2b_" + "0" * 40
CHECKOUT = Path(__file__).resolve().parents[3]
DEADLINE_SECONDS = 120.0
ADAPTER_ANSWER = b"the adapter"
NUM_REPEATS_BIG = 1_000_000
PLANTED = f"planted-{uuid.uuid4().hex}"
"""Part of every secret that the tests give to the gateway; no box may contain it."""
_SECRETS = {
    "RATCHET_DATABASE_URL": f"postgresql://ratchet:{PLANTED}@127.0.0.1/ratchet",
    "HF_TOKEN": f"hf_{PLANTED}",
    "E2B_API_KEY": f"e2b_{PLANTED}",
    "AWS_SECRET_ACCESS_KEY": PLANTED,
    "a_name_on_no_list": PLANTED,
    "BASH_ENV": f"/nowhere/{PLANTED}",
}
_SERVE_FRONT = (
    "import sys; from pathlib import Path; from sandbox_gateway.front import create_front_app;"
    "from sandbox_gateway.serve import serve_app;"
    "serve_app(create_front_app(Path(sys.argv[1]), float(sys.argv[2])), '127.0.0.1', int(sys.argv[3]))"
)


def wait_for_end(pidfd: int, seconds: float) -> bool:
    """Return whether the process has ended in that time; unlike select(), poll() takes any number of a descriptor."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class ServerProcess:
    """A gateway, or a front of several; it can be killed and started again."""

    def __init__(self, port: int, command: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with tempfile.TemporaryFile() as inherited:
            inherited.write(PLANTED.encode())
            inherited.flush()
            self._process = subprocess.Popen(
                self._command,
                cwd=CHECKOUT,
                start_new_session=True,
                env=os.environ | _SECRETS,
                pass_fds=[inherited.fileno()],
            )
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            assert self._process.poll() is None, "the server ended at start"
            assert time.monotonic() < until, "the server does not answer"
            try:
                httpx.get(f"{self.url}/health", trust_env=False, timeout=60)
                return
            except httpx.TransportError:
                time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=DEADLINE_SECONDS)
        self._process = None

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"X-API-KEY": API_KEY, **options.pop("headers", {})}
        return httpx.request(
            method, self.url + path, headers=headers, trust_env=False, timeout=DEADLINE_SECONDS, **options
        )


class FrontProcess(ServerProcess):
    """A front of the gateways in `hosts_file`."""

    def __init__(self, port: int, hosts_file: Path, lost_seconds: float) -> None:
        super().__init__(port, [sys.executable, "-c", _SERVE_FRONT, str(hosts_file), str(lost_seconds), str(port)])
        self.hosts_file = hosts_file


class GatewayProcess(ServerProcess):
    """One gateway on one root directory. `prefix`: of another user's command. `settings`: from the next start on."""

    def __init__(self, settings: GatewaySettings, prefix: Sequence[str] = ()) -> None:
        super().__init__(settings.port, prefix)
        self.settings = settings
        self._prefix = prefix

    def start(self) -> None:
        self._command = [*self._prefix, sys.executable, "-c", SERVE_GATEWAY, self.settings.model_dump_json()]
        super().start()

    def fork_server(self) -> int:
        """Return the pid of the gateway's only child; boxes are not its children."""
        assert self._process is not None
        (child,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(child)

    def kill_fork_server(self) -> None:
        """Kill it and return when it is dead, which the gateway can see."""
        child = self.fork_server()
        watched = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)
        wait_for_end(watched, DEADLINE_SECONDS)
        os.close(watched)

    def kill_all_boxes(self) -> None:
        if self._process is None:
            self.start()
        for row in self.call("GET", "/v2/sandboxes").json():
            self.call("DELETE", f"/sandboxes/{row['sandboxID']}")

    def call_box(self, box: dict[str, Any], method: str, path: str, **options: Any) -> httpx.Response:
        headers = {
            "E2b-Sandbox-Id": box["sandboxID"],
            "X-Access-Token": box["envdAccessToken"],
            **options.pop("headers", {}),
        }
        return httpx.request(
            method, self.url + path, headers=headers, trust_env=False, timeout=DEADLINE_SECONDS, **options
        )

    def box_directory(self, box_id: str) -> Path:
        return self.settings.root_directory / "boxes" / box_id


class _Adapter(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = ADAPTER_ANSWER * (NUM_REPEATS_BIG if self.path == "/big" else 1)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def _serving(host: str) -> Iterator[int]:
    with http.server.ThreadingHTTPServer((host, 0), _Adapter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def adapter_port() -> Iterator[int]:
    """A small HTTP server on the host's loopback, in place of the adapter."""
    with _serving("127.0.0.1") as port:
        yield port


@pytest.fixture(scope="session")
def outside_address() -> Iterator[str]:
    """The same server at this machine's outer address, which a box with a way to the internet reaches."""
    with _serving("0.0.0.0") as port:
        yield f"{host_address()}:{port}"


def host_address() -> str:
    """Return an address of this machine other than its loopback. Skips the test if there is none."""
    for family in psutil.net_if_addrs().values():
        for address in family:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has only its loopback address")


@pytest.fixture(scope="session")
def python_layer() -> Path:
    try:
        machine_probe.require_sandbox_support()
    except MachineError as reason:
        pytest.skip(str(reason))
    return ensure_python_layer(paths.cache())


@pytest.fixture(scope="session")
def make_settings(python_layer: Path, adapter_port: int) -> Callable[[Path], GatewaySettings]:
    def make(root: Path) -> GatewaySettings:
        return GatewaySettings(
            root_directory=root,
            api_key=API_KEY,
            port=free_port(),
            egress_ports=(adapter_port,),
            max_boxes=8,
            memory_bytes=256 << 20,
            max_processes=96,
            max_ttl_seconds=3600,
            disk_bytes=192 << 20,
            layers={PYTHON_LAYER_PATH: python_layer},
        )

    return make


def running(settings: GatewaySettings, prefix: Sequence[str] = ()) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(settings, prefix)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.kill_all_boxes()
        gateway.end()


@pytest.fixture(scope="session")
def gateway(
    make_settings: Callable[[Path], GatewaySettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """One gateway, shared by tests that leave it running."""
    yield from running(make_settings(tmp_path_factory.mktemp("gateway")))


@pytest.fixture
def own_gateway(make_settings: Callable[[Path], GatewaySettings], tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway for one test that kills and restarts it."""
    yield from running(make_settings(tmp_path / "state"))


def provider_of(gateway: ServerProcess) -> E2BProvider:
    return E2BProvider(API_KEY, gateway.url + "/", gateway.url, image_metadata_key="image")


@pytest.fixture
def provider(gateway: GatewayProcess) -> E2BProvider:
    return provider_of(gateway)


@pytest.fixture
def adapter_address(adapter_port: int) -> str:
    return f"127.0.0.1:{adapter_port}"


@pytest.fixture
def own_provider(own_gateway: GatewayProcess) -> E2BProvider:
    return provider_of(own_gateway)


async def make_box(
    provider: SandboxProvider, key: str | None = None, ttl_seconds: int = 900, *, network: bool = True
) -> Sandbox:
    return await provider.create(
        "host",
        ttl_seconds=ttl_seconds,
        metadata={"owner": "test"},
        idempotency_key=key or uuid.uuid4().hex,
        network=network,
    )


@pytest.fixture
async def box(provider: E2BProvider) -> AsyncIterator[Sandbox]:
    async with await make_box(provider) as made:
        yield made


@pytest.fixture(scope="module")
async def shared_box(gateway: GatewayProcess) -> AsyncIterator[Sandbox]:
    """One box, for tests that leave it unchanged."""
    async with await make_box(provider_of(gateway), ttl_seconds=1800) as made:
        yield made


@pytest.fixture
def raw_box(gateway: GatewayProcess) -> Iterator[dict[str, Any]]:
    """A box as the wire protocol describes it, for tests below the SDK."""
    made = gateway.call("POST", "/v2/sandboxes", json={"templateID": "base"}).json()
    yield made
    gateway.call("DELETE", f"/sandboxes/{made['sandboxID']}")


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = DEADLINE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < until, "it did not come true in time"
        await asyncio.sleep(0.05)


def boxd_pid(gateway: GatewayProcess, box_id: str) -> int:
    """Return the pid behind the box's control socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        directory = os.open(gateway.box_directory(box_id), os.O_RDONLY)
        try:
            connection.connect(f"/proc/self/fd/{directory}/ctl.sock")
        finally:
            os.close(directory)
        connection.sendall(b'{"op":"ping"}\n')
        return int(json.loads(connection.recv(4096))["pid"])
