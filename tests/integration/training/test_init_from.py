"""`init_from: DIR | RUN@step`: version 0 of a run is the named weights, or the run is refused."""

import json
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import update
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet import paths
from ratchet.payloads import PrepareRunInput, TrainRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState
from store import open_runs, runs
from store.database import Database
from store.schema import RunTable
from tests.integration.training.records import make_config, make_run

TASK = {"prompt": "fix it", "label": "a", "metadata": {"image": "host", "workdir": "/w", "eval_cmd": "true"}}


@pytest.fixture(autouse=True)
async def alone(database: Database) -> None:
    """Close the runs that other tests left open, so that a run starts as in an installation of its own."""
    async with database.begin() as connection:
        for other in await open_runs.unfinished_runs(connection):
            await runs.end_run(connection, other, RunState.CANCELLED)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    return tmp_path / "home"


async def prepare(database: Database, tmp_path: Path, run_id: str, init_from: str) -> None:
    config = {
        "model": "tiny",
        "init_from": init_from,
        "datasets": [{"path": str(tmp_path / "tasks.jsonl")}],
        "grading": {"admission": "ignored"},
    }
    settings = load_temporal_settings()
    activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None))
    await ActivityEnvironment().run(
        activities.prepare_run, PrepareRunInput(run_id=run_id, input=TrainRunInput(config=config))
    )


async def initial_weights(database: Database, run_id: str) -> bytes:
    async with database.begin() as connection:
        version = await runs.newest_version(connection, run_id, 0)
    assert version is not None
    return (Path(version.uri) / "model.safetensors").read_bytes()


async def _end(database: Database, run_id: str) -> None:
    async with database.begin() as connection:
        await runs.end_run(connection, run_id, RunState.DONE)


async def test_a_published_step_of_another_run(database: Database, tmp_path: Path, run_id: str, model: Path) -> None:
    await make_run(database, run_id, make_config(), model, paths.policies())
    await _end(database, run_id)
    await prepare(database, tmp_path, f"{run_id}-b", init_from=f"{run_id}@0")
    assert await initial_weights(database, f"{run_id}-b") == (model / "model.safetensors").read_bytes()


async def test_a_directory(database: Database, tmp_path: Path, run_id: str, model: Path) -> None:
    await prepare(database, tmp_path, run_id, init_from=str(model))
    assert await initial_weights(database, run_id) == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("init_from", ["{run}@7", "{run}@x", "nobody@0", "/nowhere"])
async def test_an_unknown_directory_or_step_is_refused(
    database: Database, tmp_path: Path, run_id: str, model: Path, init_from: str
) -> None:
    await make_run(database, run_id, make_config(), model, paths.policies())
    await _end(database, run_id)
    named = init_from.format(run=run_id)
    with pytest.raises(ApplicationError, match=named) as refused:
        await prepare(database, tmp_path, f"{run_id}-b", init_from=named)
    assert refused.value.type == "ConfigError" and refused.value.non_retryable
    async with database.begin() as connection:
        assert await runs.get_run(connection, f"{run_id}-b") is None


async def test_of_two_trainings_the_second_is_refused_until_the_first_has_ended(
    database: Database, tmp_path: Path, run_id: str, model: Path
) -> None:
    """Two runs on the same engines would be sampled by each other's weights."""
    await prepare(database, tmp_path, run_id, init_from=str(model))
    await prepare(database, tmp_path, run_id, init_from=str(model))  # running it again changes nothing
    with pytest.raises(ApplicationError, match=f"run {run_id} of engine set 'default' is still open"):
        await prepare(database, tmp_path, f"{run_id}-b", init_from=str(model))
    await _end(database, run_id)
    await prepare(database, tmp_path, f"{run_id}-b", init_from=str(model))


async def test_a_paused_run_continues_when_it_is_started_again(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await connection.execute(
            update(RunTable)
            .where(RunTable.run_id == run_id)
            .values(state=RunState.PAUSED, state_reason="NaN in step 3")
        )
        assert await open_runs.resume_run(connection, run_id) == "NaN in step 3"
        assert await open_runs.resume_run(connection, run_id) is None
        row = await runs.get_run(connection, run_id)
    assert row is not None and row.state == RunState.RUNNING
