"""`/metrics` for Prometheus: what is in the store, in the watcher's file and on the disk of the state directory.

The values are read at each request, so nothing is lost if the viewer starts again, and several viewers agree. If the
store does not answer, the other values are still served. Alert rules: `deploy/prometheus/alerts.yaml`.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from ratchet.config_engines import DEFAULT_SET
from ratchet.disk_space import free_space
from ratchet.errors import StoreUnavailableError
from ratchet.types import EngineState, SandboxState
from reads.monitoring import STEP_METRICS, Monitored, read_monitored

prometheus_route = APIRouter()
_STORE_SECONDS = 5.0
"""The time limit for the store's answer: less than Prometheus waits for an answer, which is 10 s by default."""
Values = Mapping[tuple[str, ...], float]
"""Values by label values."""


class _Found(Collector):
    """Metrics that were read for one request."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@prometheus_route.get("/metrics")
async def metrics(request: Request) -> Response:
    found = None
    with contextlib.suppress(StoreUnavailableError, TimeoutError):  # which the first metric says
        async with asyncio.timeout(_STORE_SECONDS), request.app.state.store.read() as connection:
            found = await read_monitored(connection)
    families = [_gauge("ratchet_store_answering", "1 if Postgres answered this request.", {(): found is not None})]
    if found is not None:
        families += [*_of_runs(found), *_of_boxes(found)]
    home: Path | None = request.app.state.settings.home
    if home is not None:
        families += [*_of_parts(home), *_of_disk(home)]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _gauge(name: str, meaning: str, values: Values, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


_OF_RUNS = (
    ("ratchet_run_step", "Newest published step.", "step"),
    ("ratchet_rollouts_open", "Open rollouts.", "num_open"),
    ("ratchet_rollouts_waiting", "Open rollouts whose workflow has not begun.", "num_waiting"),
    ("ratchet_queue_age_seconds", "Age of the oldest rollout whose workflow has not begun.", "oldest_waiting_seconds"),
    ("ratchet_oldest_member_seconds", "Time since the oldest open rollout began.", "oldest_open_seconds"),
    (
        "ratchet_learner_silent_seconds",
        "Time since the heartbeat of the learner, for running runs that need one and have had one.",
        "learner_silent_seconds",
    ),
)
"""Metrics with one value per run: name, meaning and field of `OpenRun`."""


def _of_runs(found: Monitored) -> list[GaugeMetricFamily]:
    runs = found.runs
    sets = sorted({DEFAULT_SET, *(engine_set for engine_set, _ in found.engines)})
    states: Values = {(one.run_id, one.state.value): 1 for one in runs}

    def by_run(field: str) -> Values:
        return {(one.run_id,): getattr(one, field) for one in runs if getattr(one, field) is not None}

    return [
        _gauge("ratchet_run_open", "1 for each run that is running or paused, by state.", states, ("run", "state")),
        *(_gauge(name, meaning, by_run(field), ("run",)) for name, meaning, field in _OF_RUNS),
        _gauge(
            "ratchet_step_metric",
            f"Metrics of the newest step: {', '.join(STEP_METRICS)}.",
            {(one.run_id, name): value for one in runs for name, value in one.metrics.items()},
            ("run", "name"),
        ),
        _gauge(
            "ratchet_engines",
            "Engines by state and set; quarantined: the canary text got other scores than the learner's.",
            {(state.value, name): found.engines.get((name, state), 0) for name in sets for state in EngineState},
            ("state", "engine_set"),
        ),
    ]


def _of_boxes(found: Monitored) -> list[GaugeMetricFamily]:
    recent = found.recent
    held: Values = {(one.value,): found.boxes.get(one, 0) for one in SandboxState if one is not SandboxState.RELEASED}
    attempts: Values = {("boot",): recent.boots, ("grade",): recent.grades}
    failures: Values = {("boot",): recent.failed_boots, ("grade",): recent.failed_grades}
    ownerless = "Boxes that are held ten minutes after the end of their rollout."
    return [
        _gauge("ratchet_boxes", "Boxes that are not released, by state.", held, ("state",)),
        _gauge("ratchet_boxes_without_owner", ownerless, {(): found.boxes_without_owner}),
        _gauge("ratchet_recent_attempts", "Boots and grades that ended within five minutes.", attempts, ("stage",)),
        _gauge("ratchet_recent_failures", "Those of them that failed.", failures, ("stage",)),
    ]


def _of_parts(home: Path) -> list[GaugeMetricFamily]:
    """Read the watcher's file (`stack/part_health.py`), which the viewer may not import."""
    try:
        written = json.loads((home / "health.json").read_text())
        age_seconds = time.time() - float(written["written_at"])
        states: Values = {(str(part["name"]), str(part["state"])): 1 for part in written["parts"]}
        restarts: Values = {(str(part["name"]),): int(part["restarts"]) for part in written["parts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        _gauge("ratchet_watcher_age_seconds", "Time since the watcher looked at the parts.", {(): age_seconds}),
        _gauge("ratchet_part_state", "1 for the state of each part.", states, ("part", "state")),
        _gauge("ratchet_part_restarts", "Restarts since `ratchet up`.", restarts, ("part",)),
    ]


def _of_disk(home: Path) -> list[GaugeMetricFamily]:
    space = free_space(home)
    return [
        _gauge("ratchet_disk_free_ratio", "Free share of the state directory's disk.", {(): space.share}),
        _gauge("ratchet_disk_free_bytes", "Free bytes on the state directory's disk.", {(): space.free_bytes}),
    ]
