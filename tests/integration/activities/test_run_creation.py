"""A run that is refused after its first version was made leaves no file of it; an earlier try's run keeps its files."""

import json
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from activities import run_creation
from activities.run_creation import InitialVersion
from ratchet import paths
from ratchet.config import RunConfig
from ratchet.errors import StoreUnavailableError
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import policy_version
from store import runs
from store.database import Database
from store.runs import NewRun
from tests.integration.training.records import make_config


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


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_run_whose_rows_cannot_be_written_leaves_no_version(
    database: Database, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """Unless the store is away: then it is not known whether the run was created, and this is tried again."""
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    tasks = tmp_path / "tasks.jsonl"
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true"}
    tasks.write_text(json.dumps({"prompt": "p", "label": "a", "metadata": metadata}) + "\n")
    config = make_config(datasets=[{"path": str(tasks)}], grading={"admission": "ignored"}, model=str(model))
    make_refusing = (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused by a test' "
        f"USING ERRCODE = '{'53100' if is_away else '23514'}'; END $$"
    )
    async with database.begin() as connection:
        await connection.execute(text(make_refusing))
        await connection.execute(text("CREATE TRIGGER refuse BEFORE INSERT ON run EXECUTE FUNCTION refuse()"))
    try:
        with pytest.raises(StoreUnavailableError if is_away else DBAPIError, match="refused by a test"):
            await run_creation.create_run_from_config(database, load_temporal_settings(), "mine", config, "test")
    finally:
        async with database.begin() as connection:
            await connection.execute(text("DROP FUNCTION refuse CASCADE"))
    assert (paths.policies() / policy_version("mine", 0, 0)).exists() == is_away
