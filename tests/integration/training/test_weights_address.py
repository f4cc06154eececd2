"""`training.weights_address`: what the learner and the creation of a run leave at the address, also after kills."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import select, update
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.pruning import PruneTask, prune_run
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from engine import weight_storage
from engine.policy_cache import PolicyCache
from engine.policy_fetcher import PolicyFetcher
from engine.policy_files import describe_files, is_intact, policy_directory, whole_model
from ratchet.background_task import running_beside
from ratchet.config_engines import DEFAULT_SET
from ratchet.payloads import PrepareRunInput, TrainRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import JsonObject, RunState
from store import engines, learner_commits, learners, runs
from store.database import Database
from store.schema import BatchTable, PolicyVersionTable
from tests.integration.training.ranks import Group
from tests.integration.training.records import make_config
from tests.integration.training.test_faults import Runs
from training.rank_runtime import RankSettings

PATIENCE_SECONDS = 120.0
TASK = {"prompt": "fix it", "label": "a", "metadata": {"image": "host", "workdir": "/w", "eval_cmd": "true"}}


class StoredRuns(Runs):
    """Runs whose versions are stored below `stored` of the test's directory, version 0 too."""

    @property
    def address(self) -> str:
        return f"file://{self.home}/stored"

    async def make(self) -> RankSettings:
        settings = await super().make()
        version = f"{settings.run_id}/0.e0"
        uri, directory = weight_storage.version_address(self.address, version), settings.policies / version
        weight_storage.upload_version(directory, uri, describe_files(directory))
        async with self.database.begin() as connection:
            storing = update(PolicyVersionTable).where(PolicyVersionTable.version == version)
            await connection.execute(storing.values(uri=uri))
        return settings

    async def versions(self, settings: RankSettings) -> list[PolicyVersionTable]:
        async with self.database.begin() as connection:
            of_run = PolicyVersionTable.run_id == settings.run_id
            rows = await connection.execute(select(PolicyVersionTable).where(of_run))
            return [PolicyVersionTable(**row._mapping) for row in rows]


@pytest.fixture
def stored_runs(database: Database, model: Path, tmp_path: Path) -> StoredRuns:
    training = {"steps": 6, "kept_versions": 1, "weights_address": f"file://{tmp_path}/stored"}
    return StoredRuns(database, model, tmp_path, make_config(training=training))


async def test_a_learner_killed_between_upload_and_row_leaves_nothing(stored_runs: StoredRuns) -> None:
    settings = await stored_runs.make()
    shutil.rmtree(settings.policies / settings.run_id)  # the learner runs where version 0 was not made
    kills = [("upload", 3, 0), ("publish", 4, 0)]
    assert await stored_runs.train(settings, 1, kills) == len(kills) + 1
    await stored_runs.assert_trained_once(settings)
    versions = await stored_runs.versions(settings)
    published = {one.version: one for one in versions if one.state == "published"}
    assert f"{settings.run_id}/3.e1" not in {one.version for one in versions}, "its row was never written"
    stored = weight_storage.list_versions(stored_runs.address, settings.run_id)
    assert {f"{settings.run_id}/{name}" for name in stored} == set(published)
    for one in published.values():
        assert one.uri == f"{stored_runs.address}/{one.version}"
        assert is_intact(Path(one.uri.removeprefix("file://")), one.files)
        assert is_intact(policy_directory(one.uri, settings.policies), one.files)


async def test_the_learner_waits_for_the_storage_and_says_so(stored_runs: StoredRuns) -> None:
    settings = await stored_runs.make()
    blocked = stored_runs.home / "stored"
    blocked.rename(stored_runs.home / "kept")
    blocked.touch()  # nothing can be made below a file
    training = asyncio.create_task(stored_runs.train(settings, 1, []))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "waits for file://" not in await _phase(stored_runs, settings):
            assert not training.done()
            await asyncio.sleep(0.1)
    blocked.unlink()
    (stored_runs.home / "kept").rename(blocked)
    assert await training == 1
    await stored_runs.assert_trained_once(settings)


async def test_a_learner_that_waits_ends_when_another_takes_over(stored_runs: StoredRuns) -> None:
    settings = await stored_runs.make()
    (stored_runs.home / "stored").rename(stored_runs.home / "kept")
    (stored_runs.home / "stored").touch()
    waiting = Group(settings, 1, stored_runs.home / "waiting")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "waits for file://" not in await _phase(stored_runs, settings):
            await asyncio.sleep(0.1)
    async with stored_runs.database.begin() as connection:
        await learner_commits.take_lease(connection, settings.run_id)
    assert await asyncio.to_thread(waiting.wait) == [0]
    assert [one.step for one in await stored_runs.versions(settings)] == [0]
    assert not (settings.policies / settings.run_id / "1.e1").exists()


def _delta_runs(database: Database, model: Path, home: Path, steps: int) -> StoredRuns:
    """Runs of updates that are small beside the weights."""
    training = {"steps": steps, "kept_versions": 2, "weights_address": f"file://{home}/stored"}
    training |= {"full_weights_every": 3, "learning_rate": 1e-5}
    return StoredRuns(database, model, home, make_config(training=training))


def _chain(version: PolicyVersionTable) -> list[str]:
    """Return the names of the versions that the version's weights are made of."""
    weights: JsonObject = next(file for file in version.files if file["name"] == "model.safetensors")
    return [link["version"].rpartition("/")[2] for link in weights.get("chain", [])]


async def test_deltas_stay_for_as_long_as_a_version_needs_them(
    database: Database, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is killed after the checkpoint of step 4, so that step 5's chain is of two learners."""
    delta_runs = _delta_runs(database, model, tmp_path, steps=5)
    settings = await delta_runs.make()
    left = settings.policies / settings.run_id / "1.e0.deltas"  # by a learner that was killed while it stored them
    left.mkdir()
    assert await delta_runs.train(settings, 1, [("commit", 4, 0)]) == 2
    await delta_runs.assert_trained_once(settings)
    versions = {one.version.rpartition("/")[2]: one for one in await delta_runs.versions(settings)}
    chains = {name: _chain(one) for name, one in versions.items()}
    assert chains["2.e1"] == ["0.e0", "1.e1", "2.e1"] and chains["3.e1"] == []
    assert chains["5.e2"] == ["3.e1", "4.e1", "5.e2"]
    async with database.begin() as connection:
        of_run = BatchTable.run_id == settings.run_id
        rows = await connection.execute(select(BatchTable.step, BatchTable.metrics).where(of_run))
        shares = {row.step: row.metrics["upload_bytes"] / row.metrics["version_bytes"] for row in rows}
    assert shares[3] == 1 and all(0 < shares[step] < 0.7 for step in (1, 2, 4, 5))

    published = {name for name, one in versions.items() if one.state == "published"}
    assert published == {path.name for path in (settings.policies / settings.run_id).iterdir()}
    assert {"0.e0", "4.e1", "5.e2"} <= published and "3.e1" not in published
    stored = weight_storage.list_versions(delta_runs.address, settings.run_id)
    assert set(stored) == published.union(*(chains[name] for name in published))
    for name in published:
        with PolicyCache(tmp_path / f"node-{name}") as node:
            assert is_intact(node.fetch(versions[name].uri, versions[name].files), versions[name].files)
            own = settings.policies / versions[name].version
            assert describe_files(own) == describe_files(policy_directory(versions[name].uri, node.root))

    async with database.begin() as connection:
        await runs.end_run(connection, settings.run_id, RunState.DONE)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    await prune_run(database, PruneTask(settings.run_id, turns=False))
    stored = weight_storage.list_versions(delta_runs.address, settings.run_id)
    assert set(stored) == {"0.e0", "3.e1", "4.e1", "5.e2"}


async def test_while_an_engine_cannot_fetch_versions_are_whole(database: Database, model: Path, tmp_path: Path) -> None:
    """The version that it waits for may have a damaged delta, and so may all that follow from it."""
    delta_runs = _delta_runs(database, model, tmp_path, steps=2)
    settings = await delta_runs.make()

    async def wait_for_weights() -> None:
        async with database.begin() as connection:
            engine_id = await engines.register_engine(connection, "http://127.0.0.1:1", "", {})
            await engines.set_engine_details(connection, engine_id, {engines.FETCH_ERROR: "a delta has sha256 0"})
        while True:
            async with database.begin() as connection:
                await engines.heartbeat_engine(connection, engine_id)
            await asyncio.sleep(1)

    async with running_beside(wait_for_weights()):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await _has_engine(database):
                await asyncio.sleep(0.05)
        assert await delta_runs.train(settings, 1, []) == 1
    assert [_chain(one) for one in await delta_runs.versions(settings)] == [[], [], []]


async def _has_engine(database: Database) -> bool:
    async with database.begin() as connection:
        return await engines.cannot_fetch(connection, DEFAULT_SET)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")
async def test_adapters_of_a_run_reach_another_node_with_their_base(
    database: Database, model: Path, tmp_path: Path
) -> None:
    training = {"steps": 2, "lora": {"rank": 4, "alpha": 8}, "weights_address": f"file://{tmp_path}/stored"}
    stored_runs = StoredRuns(database, model, tmp_path, make_config(training=training))
    settings = await stored_runs.make()
    assert await stored_runs.train(settings, 1, []) == 1
    shutil.rmtree(settings.policies)
    fetcher = PolicyFetcher(database, tmp_path / "node")
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await fetcher.newest_intact(None)
    assert found is not None and found.version == f"{settings.run_id}/2.e1"
    directory = policy_directory(found.uri, tmp_path / "node")
    assert is_intact(directory, found.files), "with the digests of its base"
    assert describe_files(whole_model(directory)) == describe_files(model)


async def _phase(stored_runs: StoredRuns, settings: RankSettings) -> str:
    async with stored_runs.database.begin() as connection:
        learner = await learners.get_learner(connection, settings.run_id)
    return learner.phase if learner else ""


async def test_a_run_begins_from_a_stored_step_of_another_machine(
    database: Database, tmp_path: Path, run_id: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ratchet evaluate RUN@step` makes such a run. The first one's weights stay while it is pruned."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    address = f"file://{tmp_path}/stored"

    async def prepare(machine: str, name: str, init_from: str) -> PolicyVersionTable:
        monkeypatch.setenv("RATCHET_HOME", str(tmp_path / machine))
        config = {
            "init_from": init_from,
            "datasets": [{"path": str(tmp_path / "tasks.jsonl")}],
            "grading": {"admission": "ignored"},
            "training": {"weights_address": address},
        }
        settings = load_temporal_settings()
        activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None))
        input = PrepareRunInput(run_id=name, input=TrainRunInput(config=config))
        await ActivityEnvironment().run(activities.prepare_run, input)
        async with database.begin() as connection:
            await runs.end_run(connection, name, RunState.DONE)
            version = await runs.newest_version(connection, name, 0)
        assert version is not None
        return version

    first = await prepare("one", run_id, str(model))
    second = await prepare("two", f"{run_id}-b", f"{run_id}@0")
    assert (first.uri, second.uri) == (f"{address}/{run_id}/0.e0", f"{address}/{run_id}-b/0.e0")
    assert is_intact(tmp_path / "two" / "policies" / f"{run_id}-b" / "0.e0", first.files)
    # Files of a version that was never recorded, as a killed learner leaves them, go when the run is pruned.
    weight_storage.upload_version(model, f"{address}/{run_id}/5.e1", describe_files(model))
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "one"))
    await prune_run(database, PruneTask(run_id, turns=False))
    assert weight_storage.list_versions(address, run_id) == ["0.e0"]
