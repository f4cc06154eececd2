"""`learn.sync` against a scripted engine: which engine becomes ready or quarantined, and the state after a failure.

The update in the real vLLM is tested in test_vllm_plugin.py.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, insert, select, update
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from engine.client import EngineClient
from engine.generate_request import Sampling
from ratchet.config_engines import DEFAULT_SET
from ratchet.payloads import SyncInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState, policy_version
from stack.ports import free_port
from store import engines
from store.database import Database
from store.schema import EngineTable, MetricTable, PolicyVersionTable, RunTable
from tests.integration.training.records import make_config, make_run

OLD, NEW = [-1.0, -2.0, -3.0, -4.0], [-1.2, -2.1, -2.7, -4.1]


@dataclass
class Stage:
    """A run whose step 1 is published, and one engine that serves step 0."""

    database: Database
    run_id: str
    client: httpx.AsyncClient
    engine_id: int
    process: "subprocess.Popen[bytes]"

    async def sync(self, said: list[str] | None = None) -> None:
        """Run `learn.sync`; `said` gets what it says in its heartbeats."""
        activities = LearnActivities(self.database, RunConfigs(self.database, load_temporal_settings()))
        environment = ActivityEnvironment()
        if said is not None:
            environment.on_heartbeat = lambda *details: said.extend(details)
        await environment.run(activities.sync, SyncInput(run_id=self.run_id, step=1, engine_id=self.engine_id))

    async def row(self) -> engines.EngineRow:
        async with self.database.begin() as connection:
            row = await engines.get_engine(connection, self.engine_id)
        assert row is not None
        return row

    async def paused_until(self) -> datetime:
        async with self.database.begin() as connection:
            found = (
                await connection.execute(select(EngineTable.paused_until).where(EngineTable.id == self.engine_id))
            ).scalar_one()
        assert found is not None
        return found

    async def script(self, **values: Any) -> None:
        (await self.client.post("/script", json=values)).raise_for_status()

    async def metrics(self) -> dict[str, float]:
        async with self.database.begin() as connection:
            rows = await connection.execute(
                select(MetricTable.name, MetricTable.value).where(
                    MetricTable.run_id == self.run_id, MetricTable.step == 1
                )
            )
            return {row[0]: row[1] for row in rows}


@pytest.fixture
async def stage(
    database: Database, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    await make_run(database, run_id, make_config())
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.standins.engine", str(port)])
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
    async with asyncio.timeout(300):
        while True:
            try:
                await client.get("/health")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
    async with database.begin() as connection:
        for step, logprobs in ((0, OLD), (1, NEW)):
            values = {"version": policy_version(run_id, step, 1), "run_id": run_id, "step": step, "epoch": 1}
            files = [{"name": "model.safetensors", "sha256": "00", "bytes": 1}]
            row = {"uri": str(tmp_path / "policies" / run_id / f"{step}.e1"), "files": files}
            canary = {"ids": [5, 6, 7, 8, 9], "logprobs": logprobs}
            await connection.execute(insert(PolicyVersionTable).values(**values, **row, canary=canary))
        details = {"pid": 1, engines.CHECKS_FILES: True}
        engine_id = await engines.register_engine(connection, f"http://127.0.0.1:{port}", "", details)
        serving = {"state": EngineState.READY, "version": policy_version(run_id, 0, 1)}
        (await client.post("/update_weight_version", json={"new_version": serving["version"]})).raise_for_status()
        await connection.execute(update(EngineTable).where(EngineTable.id == engine_id).values(**serving))
    yield Stage(database, run_id, client, engine_id, process)
    await client.aclose()
    process.kill()
    process.wait()


async def test_an_engine_with_the_learners_scores_is_ready(stage: Stage) -> None:
    await stage.script(scores=[value + 0.01 for value in NEW])
    await stage.sync()
    row = await stage.row()
    assert (row.state, row.version) == (EngineState.READY, policy_version(stage.run_id, 1, 1))
    said = await stage.metrics()
    assert said["canary_gap_mean"] == pytest.approx(0.01, rel=0.01)
    assert 0 < said["sync_pause_seconds"] < said["sync_first_token_seconds"] < said["sync_seconds"]
    assert not (await stage.client.get("/is_paused")).json()["is_paused"]
    seen = (await stage.client.get("/calls")).json()
    assert [check[1:] for check in seen["checks"]] == [[one["files"], one["sha256"]] for one in seen["updates"]]
    await stage.sync()  # a second sync of the same version changes nothing


@pytest.mark.parametrize(
    ("scores", "reason"),
    [(OLD, "still serves the weights before"), ([value - 1 for value in NEW], "differ from the learner's by 1.000")],
)
async def test_an_engine_with_other_scores_is_quarantined_with_the_reason(
    stage: Stage, scores: list[float], reason: str
) -> None:
    """The update succeeded and the label is new, but the weights are the old ones, or others."""
    small = [old + 0.2 * (new - old) for old, new in zip(OLD, NEW, strict=True)]
    async with stage.database.begin() as connection:
        canary = {"ids": [5, 6, 7, 8, 9], "logprobs": small if scores == OLD else NEW}
        statement = update(PolicyVersionTable).where(PolicyVersionTable.version == policy_version(stage.run_id, 1, 1))
        await connection.execute(statement.values(canary=canary))
    await stage.script(scores=scores)
    await stage.sync()
    row = await stage.row()
    assert row.state is EngineState.QUARANTINED
    assert reason in row.details["canary"]["reason"] and row.details["pid"] == 1
    async with stage.database.begin() as connection:
        assert row.id not in [one.id for one in await engines.ready_engines(connection, DEFAULT_SET)]
    await stage.sync()
    assert (await stage.row()).state is EngineState.QUARANTINED, "only its wrapper makes it ready again"


@pytest.mark.parametrize(("engine", "cleared"), [({}, "true"), ({"keep_cache": True}, "false")])
async def test_caches_are_cleared_unless_the_run_keeps_them(stage: Stage, engine: dict[str, Any], cleared: str) -> None:
    """Kept or not, a new call shares no block with another version: the adapter salts the cache by version."""
    async with stage.database.begin() as connection:
        config = make_config(engine=engine).model_dump(mode="json")
        await connection.execute(update(RunTable).where(RunTable.run_id == stage.run_id).values(config=config))
    await stage.script(scores=NEW)
    await stage.sync()
    async with EngineClient(str(stage.client.base_url)) as client:
        await client.generate([5, 6], Sampling(1, 1.0), "turn-1", (await stage.row()).version)
    seen = (await stage.client.get("/calls")).json()
    assert seen["pauses"] == [{"mode": "keep", "clear_cache": cleared}]
    expected = blake2b(policy_version(stage.run_id, 1, 1).encode(), digest_size=16).hexdigest()
    assert [call["salt"] for call in seen["calls"]] == [expected]


@pytest.mark.parametrize("ending", ["die", "refuse"])
async def test_an_update_that_fails_never_resumes_the_engine(stage: Stage, ending: str) -> None:
    """After a kill in mid-update or a wrong digest the lease stays, no call is sent there, the wrapper takes over."""
    await stage.script(update=ending)
    with pytest.raises(ApplicationError) as caught:
        await stage.sync()
    assert caught.value.type == "EngineUnavailableError" and not caught.value.non_retryable
    row = await stage.row()
    assert row.state is EngineState.SYNCING and row.pause_seconds_left is not None and row.pause_seconds_left > 0
    assert row.version == policy_version(stage.run_id, 0, 1)
    if ending == "refuse":
        assert (await stage.client.get("/is_paused")).json()["is_paused"]


async def test_an_update_that_would_be_refused_pauses_no_engine(stage: Stage) -> None:
    await stage.script(update="refuse check")
    with pytest.raises(ApplicationError, match="would refuse the update: scripted") as caught:
        await stage.sync()
    assert caught.value.type == "EngineUnavailableError" and not caught.value.non_retryable
    assert (await stage.row()).state is EngineState.READY
    seen = (await stage.client.get("/calls")).json()
    assert (seen["pauses"], seen["updates"]) == ([], [])


async def test_an_engine_without_the_worker_extension_is_not_asked(stage: Stage) -> None:
    """One that the user has started. A method that its workers do not have would put them out of step."""
    async with stage.database.begin() as connection:
        await engines.set_engine_details(connection, stage.engine_id, {engines.CHECKS_FILES: False})
    await stage.script(scores=NEW)
    await stage.sync()
    assert (await stage.row()).state is EngineState.READY
    seen = (await stage.client.get("/calls")).json()
    assert (seen["checks"], len(seen["updates"])) == ([], 1)


async def test_a_silent_engine_does_not_stop_the_run(stage: Stage) -> None:
    """Its machine is gone, so its row is not set to `gone`. If it returns, it catches up before it serves."""
    async with stage.database.begin() as connection:
        silent = {"heartbeat_at": func.now() - timedelta(minutes=5)}
        await connection.execute(update(EngineTable).where(EngineTable.id == stage.engine_id).values(**silent))
    stage.process.kill()
    await stage.sync()
    assert (await stage.row()).version == policy_version(stage.run_id, 0, 1)


async def test_a_long_update_keeps_its_lease(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper takes over a lapsed pause, and two loads at once would leave unknown weights."""
    monkeypatch.setattr("engine.weight_update.PAUSE_SECONDS", 2.0)
    await stage.script(scores=NEW, update="hold")
    syncing = asyncio.create_task(stage.sync())
    async with asyncio.timeout(60):
        while (await stage.row()).state is not EngineState.SYNCING:
            await asyncio.sleep(0.05)
    first = await stage.paused_until()
    async with asyncio.timeout(60):
        while await stage.paused_until() <= first + timedelta(seconds=2):  # longer than the first lease
            assert not syncing.done()
            await asyncio.sleep(0.05)
    await stage.client.post("/release", json={"hold": "update"})
    await syncing
    row = await stage.row()
    assert (row.state, row.version) == (EngineState.READY, policy_version(stage.run_id, 1, 1))


async def test_a_version_at_an_address_is_fetched_before_the_pause(stage: Stage) -> None:
    """The engine's node fetches it; until the engine's row says that it is there, the engine generates."""
    version = policy_version(stage.run_id, 1, 1)
    async with stage.database.begin() as connection:
        storing = update(PolicyVersionTable).where(PolicyVersionTable.version == version)
        await connection.execute(storing.values(uri=f"s3://bucket/runs/{version}"))
        await engines.set_engine_details(connection, stage.engine_id, {engines.FETCH_ERROR: "s3://bucket: no answer"})
    await stage.script(scores=NEW)
    said: list[str] = []
    syncing = asyncio.create_task(stage.sync(said))
    async with asyncio.timeout(60):
        while len(said) < 3:
            await asyncio.sleep(0.05)
    assert f"fetches {version}: s3://bucket: no answer" in said[0]
    assert (await stage.row()).state is EngineState.READY and not syncing.done()
    assert (await stage.client.get("/calls")).json()["pauses"] == []
    async with stage.database.begin() as connection:
        await engines.set_engine_details(connection, stage.engine_id, {engines.FETCHED: [version]})
    async with asyncio.timeout(60):
        await syncing
    assert (await stage.row()).version == version
    [loaded] = (await stage.client.get("/calls")).json()["updates"]
    assert loaded["files"] == [f"{version}/model.safetensors"]


async def test_an_engine_that_ends_while_it_fetches_is_skipped(stage: Stage) -> None:
    version = policy_version(stage.run_id, 1, 1)
    async with stage.database.begin() as connection:
        storing = update(PolicyVersionTable).where(PolicyVersionTable.version == version)
        await connection.execute(storing.values(uri=f"s3://bucket/runs/{version}"))
    said: list[str] = []
    syncing = asyncio.create_task(stage.sync(said))
    async with asyncio.timeout(60):
        while not said:
            await asyncio.sleep(0.05)
        async with stage.database.begin() as connection:
            await engines.set_engine_gone(connection, stage.engine_id)
        await syncing
