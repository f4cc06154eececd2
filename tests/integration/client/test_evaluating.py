"""What is refused: a step of an open run, and what would use tokens or weights of a run that an endpoint answered."""

from pathlib import Path

import pytest
from sqlalchemy import update

from activities.run_creation import model_directory
from cli.console import answered_by
from client.evaluating import EvaluationSettings, read_reports, run_evaluation
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import ConfigError
from ratchet.store import engines, evaluations, reports, runs, steering
from ratchet.store.database import Database
from ratchet.store.schema import RunTable
from ratchet.types import RunState
from stack.parts import Stack
from stack.train_from_store import create_stored_run
from tests.integration.training.records import make_config, make_run
from training.sample_export import export_run


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.PAUSED])
@pytest.mark.parametrize("step", [3, 7])
async def test_a_step_of_an_open_run_is_refused(
    database: Database,
    run_id: str,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: RunState,
    step: int,
) -> None:
    """Also its present one, 7: it may have trained another by the time that it is evaluated."""
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    datasets = [{"path": "train.jsonl"}, {"path": "heldout.jsonl", "use": "eval"}]
    await make_run(database, run_id, make_config(datasets=datasets))
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(step=7, state=state))
    with pytest.raises(ConfigError, match=f"open at step 7.*`ratchet evaluate {run_id}` evaluates it at its next"):
        await run_evaluation(Stack(tmp_path), f"{run_id}@{step}", EvaluationSettings(), "anna", lambda line: None)
    async with database.begin() as connection:
        assert not await evaluations.asked_evaluations(connection, run_id)


ENDPOINT = {"url": "https://api.example.org/v1", "model": "big"}


async def test_a_run_that_an_endpoint_answered_says_so_and_trains_nothing(
    database: Database, run_id: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    await make_run(database, run_id, make_config(endpoint=ENDPOINT, training={"steps": 0}))
    async with database.begin() as connection:
        await runs.publish_initial(connection, f"{run_id}/0.e0", run_id, ENDPOINT["url"], [])
        assert not await engines.newest_published_policies(connection, DEFAULT_SET), "no engine loads its weights"
        listed = (await reports.list_runs(connection))[0]
        assert listed["endpoint"] == ENDPOINT and "no tokens are captured" in answered_by(listed["endpoint"])
        with pytest.raises(ConfigError, match="tokens are not captured"):
            await export_run(connection, run_id, ["jsonl"], tmp_path)
        with pytest.raises(ConfigError, match="nothing can be trained"):
            await steering.record_extension(connection, steering.Request(run_id, "r", "anna"), 1)
    with pytest.raises(ConfigError, match="has no weights"):
        await model_directory(database, make_config(init_from=f"{run_id}@0"))
    with pytest.raises(ConfigError, match="tokens are not captured"):
        await create_stored_run(database, f"{run_id}-b", run_id, make_config(init_from=str(model_here(tmp_path))), "x")
    report = await read_reports(Stack(tmp_path), run_id)
    assert (report["endpoint"], report["tokens_captured"]) == (ENDPOINT, False)


def model_here(directory: Path) -> Path:
    """Return a directory that is usable as a policy."""
    (directory / "config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("")
    return directory
