"""The addresses that an agent's box of E2B's service may reach, and the configurations that are refused."""

import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ratchet.errors import ConfigError, RatchetError
from sandboxes.e2b import E2BProvider
from sandboxes.e2b_network import hosts_of_agents

_DENY = ["0.0.0.0/0"]


@pytest.mark.parametrize(
    ("api_url", "adapter_url", "allowed"),
    [
        (None, "https://adapter.example.com", "adapter.example.com"),
        (None, "https://adapter.example.com:443/prefix", "adapter.example.com"),
        (None, "https://203.0.113.7:18001", "203.0.113.7"),
        ("https://api.e2b.app", "https://adapter.example.com", "adapter.example.com"),
        ("http://fleet.internal:3000", "http://10.1.2.3:18001", "10.1.2.3"),
        ("http://10.0.0.5:8410", "http://127.0.0.1:18001", "127.0.0.1"),
    ],
)
def test_only_the_adapter_is_allowed(api_url: str | None, adapter_url: str, allowed: str) -> None:
    assert hosts_of_agents(api_url, adapter_url) == [allowed]


@pytest.mark.parametrize("api_url", [None, "https://api.e2b.app", "https://api.foxtrot-2.e2b.dev/"])
@pytest.mark.parametrize(
    "adapter_url",
    [
        "",
        "http://127.0.0.1:18001",
        "http://adapter.example.com",
        "http://203.0.113.7",
        "https://adapter.example.com:18001",
    ],
)
def test_an_adapter_that_the_cloud_cannot_reach_safely_is_refused(api_url: str | None, adapter_url: str) -> None:
    with pytest.raises(ConfigError, match="https address") as refused:
        hosts_of_agents(api_url, adapter_url)
    assert "ADAPTER_PUBLIC_HOST" in str(refused.value)


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that records the create calls and refuses them, at a host name that is not loopback's usual one."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = b'{"code": 400, "message": "recorded"}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.2", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.2:{server.server_address[1]}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("network", [True, False])
async def test_the_sdk_sends_the_allow_list(
    service: tuple[str, list[dict[str, Any]]], network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = service
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.2")
    provider = E2BProvider("e2b_x", url, url, adapter_url="https://adapter.example.com")
    with pytest.raises(RatchetError, match="recorded"):
        await provider.create("base", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex, network=network)
    (body,) = bodies
    if network:
        assert body["network"] == {"allowOut": ["adapter.example.com"], "denyOut": _DENY}
    else:
        assert body["allow_internet_access"] is False and "network" not in body


async def test_nothing_is_sent_to_the_cloud_if_it_is_refused() -> None:
    provider = E2BProvider("e2b_x", adapter_url="http://127.0.0.1:18001")
    with pytest.raises(ConfigError, match="https address"):
        await provider.create("base", ttl_seconds=60, metadata={}, idempotency_key="x")
