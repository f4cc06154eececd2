"""A run of LoRA under kills: the adapters equal those of the undisturbed run, bit by bit."""

from pathlib import Path

import pytest

from engine import adapter_files
from engine.policy_files import is_intact, policy_directory
from store import runs
from store.database import Database
from store.schema import PolicyVersionTable
from tests.integration.training.records import make_config
from tests.integration.training.test_faults import Runs
from training import checkpoint
from training.rank_runtime import RankSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")


async def last_version(equal_runs: Runs, settings: RankSettings) -> PolicyVersionTable:
    async with equal_runs.database.begin() as connection:
        version = await runs.newest_version(connection, settings.run_id)
    assert version is not None and version.step == equal_runs.config.training.steps
    return version


async def test_kills_change_nothing_and_versions_are_adapters(database: Database, model: Path, tmp_path: Path) -> None:
    config = make_config(training={"steps": 4, "lora": {"rank": 4, "alpha": 8}})
    equal_runs = Runs(database, model, tmp_path, config)
    undisturbed, killed = await equal_runs.make(), await equal_runs.make()
    assert await equal_runs.train(undisturbed, 1, []) == 1
    kills = [("write", 1, 0), ("publish", 2, 0), ("commit", 2, 0), ("step", 3, 0), ("save", 4, 0)]
    assert await equal_runs.train(killed, 1, kills) == len(kills) + 1
    digests = []
    for settings in (undisturbed, killed):
        await equal_runs.assert_trained_once(settings)
        version = await last_version(equal_runs, settings)
        directory = policy_directory(version.uri, settings.policies)
        assert [file["name"] for file in version.files] == [
            adapter_files.CONFIG,
            adapter_files.WEIGHTS,
            adapter_files.BASE,
        ]
        assert is_intact(directory, version.files)
        assert adapter_files.read_base(directory).directory.name == "0.e0", "its base is the run's version 0"
        digests.append([file["sha256"] for file in version.files if file["name"] == adapter_files.WEIGHTS])
        newest = settings.checkpoints / settings.run_id / f"step4.e{version.epoch}"
        assert '"rank": 4' in (checkpoint.read_adapter(str(newest)) or "")
    assert digests[0] == digests[1]
