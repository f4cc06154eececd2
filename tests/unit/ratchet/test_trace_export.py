"""Processes that export spans: what arrives, what a collector that is away costs, and what is counted as lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ratchet.tracing import RolloutTrace
from tests.standins.collector import Collector

ROOT = Path(__file__).parents[3]
INSTALLATION = UUID(int=7)
SCRIPT = """
import atexit, sys, time
from datetime import UTC, datetime, timedelta
from uuid import UUID
from ratchet import logs, tracing
from ratchet.trace_export import start_exporting
logs.configure_logs("test")
start_exporting("test")
slowest = 0.0
for rollout_id in range(1, int(sys.argv[1]) + 1):
    trace = tracing.RolloutTrace.of(UUID(int=7), rollout_id)
    began = time.perf_counter()
    try:
        with tracing.rollout_span(trace, 1, "agent", {"stage": "agent", "gen_ai.operation.name": "chat", "box": None}):
            with tracing.span("request", {}):
                print("headers", tracing.trace_headers()) if rollout_id == 1 else None
                raise ValueError("postgresql://me:pass1234@host is away")
    except ValueError:
        pass
    slowest = max(slowest, time.perf_counter() - began)
    now = datetime.now(UTC)
    tracing.record_span(trace, 1, "attempt", now - timedelta(seconds=9), now, {})
    tracing.record_span(trace, None, "rollout", now - timedelta(seconds=10), now, {"reward": 1.0})
print("slowest", slowest)
ended = time.perf_counter()
atexit._run_exitfuncs()
print("ended after", time.perf_counter() - ended)
"""


def run(num_rollouts: int, **environment: str) -> str:
    values = {**os.environ, "RATCHET_LOG_FORMAT": "json", **environment}
    command = [sys.executable, "-c", SCRIPT, str(num_rollouts)]
    done = subprocess.run(command, env=values, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "spans lost"]


def test_spans_have_derived_ids_and_parents() -> None:
    trace = RolloutTrace.of(INSTALLATION, 1)
    with Collector() as collector:
        output = run(1, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    [agent], [request], [attempt], [rollout] = (
        collector.named(name) for name in ("agent", "request", "attempt", "rollout")
    )
    assert {one.trace for one in collector.spans} == {trace.hex}
    assert (rollout.parent, attempt.parent, agent.parent, request.parent) == ("", rollout.id, attempt.id, agent.id)
    assert (rollout.id, attempt.id) == (f"{trace.span_id():016x}", f"{trace.span_id(1):016x}")
    assert agent.attributes == {"ratchet.stage": "agent", "gen_ai.operation.name": "chat"}
    assert agent.error == request.error == "ValueError: postgresql://me@host is away" and rollout.error is None
    assert rollout.ended - rollout.began == pytest.approx(10e9, abs=1e4)
    assert agent.service == "ratchet-test" and losses(output) == []
    assert f"headers {{'traceparent': '00-{trace.hex}-{request.id}-01'}}" in output


def test_every_process_samples_the_same_rollouts() -> None:
    sampler = {"OTEL_TRACES_SAMPLER_ARG": "0.5"}
    found = []
    for name in ("traceidratio", "parentbased_traceidratio"):
        with Collector() as collector:
            run(40, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_TRACES_SAMPLER=name, **sampler)
        by_name = {kind: {one.trace for one in collector.named(kind)} for kind in ("agent", "request", "rollout")}
        assert by_name["agent"] == by_name["request"] == by_name["rollout"]
        found.append(by_name["rollout"])
    assert found[0] == found[1] and 8 < len(found[0]) < 32


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_without_a_usable_collector_there_are_no_spans(environment: dict[str, str]) -> None:
    with Collector() as collector:
        address = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url} if environment else {}
        output = run(1, **address, **environment)
    assert "headers {}" in output and collector.num_requests == 0
    assert ("only http/protobuf" in output) == ("OTEL_EXPORTER_OTLP_PROTOCOL" in environment)


def test_a_collector_that_hangs_is_not_waited_for_and_losses_are_counted() -> None:
    with Collector(hangs=True) as collector:
        began = time.monotonic()
        output = run(1000, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)  # 4,000 spans; the queue has room for 2,048
        assert time.monotonic() - began < 60
    full, rest = losses(output)
    assert full["reason"] == "the queue is full" and 0 < full["number"] < full["of"]
    assert (rest["number"], rest["of"]) == (4000, 4000)
    assert float(output.split("ended after ")[1]) < 10


def test_a_collector_that_is_away_is_said_once() -> None:
    output = run(1, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert [one["number"] for one in losses(output)] in ([4], [4, 4]) and "Traceback" not in output
