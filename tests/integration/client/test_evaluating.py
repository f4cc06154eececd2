"""What is refused before anything is started: a step of an open run."""

from pathlib import Path

import pytest
from sqlalchemy import update

from client.evaluating import EvaluationSettings, run_evaluation
from ratchet.errors import ConfigError
from ratchet.store import evaluations
from ratchet.store.database import Database
from ratchet.store.schema import RunTable
from ratchet.types import RunState
from stack.parts import Stack
from tests.integration.training.records import make_config, make_run


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
