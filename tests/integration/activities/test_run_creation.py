"""A run that is refused after its first version was made leaves no file of it; an earlier try's run keeps its files."""

from pathlib import Path

import pytest

from activities import run_creation
from activities.run_creation import InitialVersion
from ratchet import paths
from ratchet.config import RunConfig
from ratchet.store import runs
from ratchet.store.database import Database
from ratchet.store.runs import NewRun
from ratchet.types import policy_version


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InitialVersion:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    directory = paths.policies() / policy_version("mine", 0, 0)
    stored = tmp_path / "storage" / "0.e0"
    for folder in (directory, stored):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    return InitialVersion(f"file://{stored}", [{"name": "model.safetensors", "sha256": "aa"}])


def files_of(version: InitialVersion) -> list[bool]:
    return [
        (place / "model.safetensors").exists()
        for place in (paths.policies() / policy_version("mine", 0, 0), Path(version.uri.removeprefix("file://")))
    ]


async def test_a_refused_run_leaves_no_version(database: Database, version: InitialVersion) -> None:
    await run_creation._discard_version(database, "mine", version)
    assert files_of(version) == [False, False]
    await run_creation._discard_version(database, "mine", version)  # it may be tried again


async def test_the_version_of_a_run_that_exists_is_kept(database: Database, version: InitialVersion) -> None:
    config = RunConfig.model_validate({"datasets": [{"path": "x"}]})
    async with database.begin() as connection:
        await runs.create_run(connection, NewRun.of_config("mine", "test", config, None))
    await run_creation._discard_version(database, "mine", version)
    assert files_of(version) == [True, True]
