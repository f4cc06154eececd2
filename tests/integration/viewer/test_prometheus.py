"""The viewer's metrics for Prometheus, and the alert rules over them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, insert, update

from stack.part_health import PartHealth, write_health
from store.database import Database
from store.schema import EngineTable, LearnerTable, RolloutTable, RunTable, SandboxTable
from tests.integration.viewer.filled_store import FilledRun
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
BOARD = ROOT / "deploy" / "grafana" / "ratchet.json"
OF_THE_SDK = {"temporal_workflow_task_execution_failed"}
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        rows = found.setdefault(family.name, {})
        for sample in family.samples:
            rows[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
async def viewer(database: Database, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_viewer_app(ViewerSettings(database.url, home=tmp_path))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8420") as client,
    ):
        yield client


async def scrape(viewer: httpx.AsyncClient) -> Samples:
    answer = await viewer.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return parse(answer.text)


async def test_the_store_the_parts_and_the_disk_are_shown(
    viewer: httpx.AsyncClient, database: Database, filled: FilledRun, tmp_path: Path
) -> None:
    answering = PartHealth("gateway")
    answering.see_process(1, 1.0, True, 0.0, "")
    answering.see_success("", 1.0)
    write_health(tmp_path, [answering, PartHealth("worker", restarts=2)], 10.0)
    run = (("run", filled.run_id),)
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == filled.run_id).values(state="running"))
        mine = update(RolloutTable).where(RolloutTable.id == filled.running)
        await connection.execute(mine.values(owner="w", claimed_at=func.now() - timedelta(hours=7)))
        long_ago = func.now() - timedelta(hours=1)
        ended = update(RolloutTable).where(RolloutTable.id == filled.solved)
        await connection.execute(ended.values(ended_at=long_ago))
        box = {"provider": "p", "role": "agent", "attempt": 1, "workflow_id": "w", "image": "i", "state": "live"}
        await connection.execute(insert(SandboxTable).values(**box, rollout_id=filled.solved))
        await connection.execute(insert(EngineTable).values(address="a", state="quarantined", model_path="m"))
        other = {"address": "b", "engine_set": "b", "state": "ready", "model_path": "m"}
        await connection.execute(insert(EngineTable).values(**other))
        await connection.execute(update(LearnerTable).values(heartbeat_at=long_ago))
    found = await scrape(viewer)
    assert found["ratchet_store_answering"][()] == 1
    assert found["ratchet_run_open"][(*run, ("state", "running"))] == 1
    assert found["ratchet_oldest_member_seconds"][run] >= 7 * 3600
    assert found["ratchet_boxes_without_owner"][()] == 1
    engines = found["ratchet_engines"]
    assert engines[("engine_set", "default"), ("state", "quarantined")] == 1
    assert engines[("engine_set", "b"), ("state", "ready")] == 1 and sum(engines.values()) == 2
    states = {(("part", "gateway"), ("state", "answering")): 1, (("part", "worker"), ("state", "stopped")): 1}
    assert found["ratchet_part_state"] == states
    assert found["ratchet_part_restarts"][(("part", "worker"),)] == 2
    assert found["ratchet_watcher_age_seconds"][()] > 1000
    assert 0 < found["ratchet_disk_free_ratio"][()] < 1


async def test_without_a_store_the_rest_is_served_all_the_same(tmp_path: Path) -> None:
    app = create_viewer_app(ViewerSettings("postgresql://nobody@127.0.0.1:1/none", home=tmp_path))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8420") as client,
    ):
        found = await scrape(client)
    assert found["ratchet_store_answering"][()] == 0 and "ratchet_disk_free_bytes" in found


async def test_every_metric_of_the_rules_exists(viewer: httpx.AsyncClient, filled: FilledRun, tmp_path: Path) -> None:
    """A rule about a metric that nothing serves never fires."""
    write_health(tmp_path, [PartHealth("worker")], 10.0)
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"\b(?:ratchet|temporal)_\w+", rule["expr"])}
    assert len(used) > 12 and used - OF_THE_SDK <= set(await scrape(viewer))


async def test_every_metric_of_the_board_exists_and_every_metric_is_on_it(
    viewer: httpx.AsyncClient, filled: FilledRun, tmp_path: Path
) -> None:
    write_health(tmp_path, [PartHealth("worker")], 10.0)
    panels = json.loads(BOARD.read_text())["panels"]
    used = {name for one in targets_of(panels) for name in re.findall(r"\b(?:ratchet|temporal)_\w+", one["expr"])}
    assert used - OF_THE_SDK == set(await scrape(viewer)) - {"ratchet_disk_free_bytes"}, "the ratio says the same"


async def test_every_label_of_a_legend_exists(viewer: httpx.AsyncClient, filled: FilledRun, tmp_path: Path) -> None:
    write_health(tmp_path, [PartHealth("worker")], 10.0)
    labels = {
        name: {label for key in rows for label, _ in key} for name, rows in (await scrape(viewer)).items() if rows
    }
    for one in targets_of(json.loads(BOARD.read_text())["panels"]):
        for name in set(re.findall(r"\bratchet_\w+", one["expr"])) & labels.keys():
            assert set(re.findall(r"{{(\w+)}}", one["legendFormat"])) <= labels[name], name


def test_the_panels_of_the_board_fill_its_rows() -> None:
    """Grafana's grid has 24 columns; panels with equal ids, or in one place, hide each other."""
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    widths: dict[int, int] = {}
    for one in panels:
        place = one["gridPos"]
        assert place["x"] == widths.get(place["y"], 0), one["title"]
        widths[place["y"]] = place["x"] + place["w"]
    assert set(widths.values()) == {24}


def targets_of(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [target for panel in panels for target in panel["targets"]]


def test_the_rules_fire_and_are_quiet() -> None:
    """promtool is Prometheus' own: `go build github.com/prometheus/prometheus/cmd/promtool`."""
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; PROMTOOL names it")
    for arguments in (["check", "rules", RULES.name], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
