"""Traces in a real Jaeger, if `jaeger-all-in-one` is on PATH or JAEGER names the program (tried with 1.76)."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from ratchet.tracing import RolloutTrace
from stack.ports import free_port
from tests.unit.ratchet.test_trace_export import INSTALLATION, run

PROGRAM = os.environ.get("JAEGER") or shutil.which("jaeger-all-in-one")
_LISTENERS = ("collector.otlp.http", "collector.otlp.grpc", "collector.http-server", "collector.grpc-server")
_OTHERS = ("query.http-server", "query.grpc-server", "admin.http")


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """The ports of a Jaeger that runs, by the name of its listener."""
    if PROGRAM is None:
        pytest.skip("no Jaeger: neither on PATH nor named by JAEGER")
    found = {name: free_port() for name in (*_LISTENERS, *_OTHERS)}
    arguments = [f"--{name}.host-port=127.0.0.1:{port}" for name, port in found.items()]
    with subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield found
        process.terminate()


def ask(port: int, path: str, seconds: float = 60) -> httpx.Response:
    """Return the first good answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=60)
            if answer.is_success:
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"no answer to {path}"
        time.sleep(0.1)


def test_jaeger_shows_one_tree_under_the_derived_id(ports: dict[str, int]) -> None:
    ask(ports["admin.http"], "/")
    output = run(1, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{ports['collector.otlp.http']}")
    assert "spans lost" not in output
    trace = RolloutTrace.of(INSTALLATION, 1)
    [found] = ask(ports["query.http-server"], f"/api/traces/{trace.hex}").json()["data"]
    names = {span["spanID"]: span["operationName"] for span in found["spans"]}
    tree = {(span["operationName"], *(names[one["spanID"]] for one in span["references"])) for span in found["spans"]}
    assert tree == {("rollout",), ("attempt", "rollout"), ("agent", "attempt"), ("request", "agent")}
    assert {one["serviceName"] for one in found["processes"].values()} == {"ratchet-test"}
    assert not any(span["warnings"] for span in found["spans"])
