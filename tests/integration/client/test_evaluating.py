"""Refused evaluations: a step of an open run, and uses of tokens or weights of a run that an endpoint answered."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.dataset_import import import_dataset
from activities.run_creation import model_directory
from cli.console import answered_by
from client import evaluating
from client.evaluating import EvaluationSettings, read_reports, run_evaluation
from ratchet.config import DatasetConfig
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import ConfigError, MachineError, StoreUnavailableError
from ratchet.types import Purpose, RunState
from reads.runs import list_run_summaries
from stack.parts import Stack
from stack.supervisor import Supervisor
from stack.train_from_store import create_stored_run
from store import engines, evaluations, runs, steering
from store.database import Database
from store.runs import OrderedTask
from store.schema import RunTable, TaskTable
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


class _AwayDatabase(Database):
    """A store that does not answer the third and fourth question; before it does again, the run has ended."""

    num_begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        self.num_begun += 1
        if self.num_begun in (3, 4):
            raise StoreUnavailableError("Postgres at here:1 refuses connections")
        async with super().begin() as connection:
            if self.num_begun == 5:
                await connection.execute(update(RunTable).values(state=RunState.STOPPED, state_reason="by anna"))
            yield connection


@pytest.mark.parametrize("is_up", [True, False])
async def test_an_outage_of_the_store_is_waited_for(
    database: Database,
    run_id: str,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_up: bool,
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    monkeypatch.setattr(evaluating, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(Supervisor, "is_up", lambda self: is_up)
    held_out = DatasetConfig(path=str(tmp_path / "heldout.jsonl"), use="eval")
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true"}
    Path(held_out.path).write_text(json.dumps({"prompt": "p", "label": "one", "metadata": metadata}))
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await import_dataset(connection, held_out, run_id)
        named = select(TaskTable.id).where(TaskTable.dataset == held_out.path)
        task_id = (await connection.execute(named)).scalar_one()
        await runs.set_task_order(connection, run_id, Purpose.EVAL, [OrderedTask(task_id, 0)])
        await connection.execute(update(RunTable).values(state=RunState.RUNNING))
        row = await runs.get_run(connection, run_id)
    assert row is not None
    stack = Stack(tmp_path)
    monkeypatch.setattr(stack, "database", lambda: _AwayDatabase(postgres_url))
    said: list[str] = []
    expected = (ConfigError, "is stopped: by anna") if is_up else (MachineError, "the stack was stopped")
    with pytest.raises(expected[0], match=expected[1]):
        await evaluating._evaluate_open_run(stack, row, EvaluationSettings(), "anna", said.append)
    away = "Postgres at here:1 refuses connections; the evaluation goes on when it does"
    assert said.count(away) == (1 if is_up else 0)


ENDPOINT = {"url": "https://api.example.org/v1", "model": "big", "tokens": False}


async def test_a_run_that_an_endpoint_answered_says_so_and_trains_nothing(
    database: Database, run_id: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    await make_run(database, run_id, make_config(endpoint=ENDPOINT, training={"steps": 0}))
    async with database.begin() as connection:
        await runs.publish_initial(connection, f"{run_id}/0.e0", run_id, ENDPOINT["url"], [])
        assert not await engines.newest_published_policies(connection, DEFAULT_SET), "no engine loads its weights"
        listed = (await list_run_summaries(connection))[0]
        assert listed.endpoint == ENDPOINT and "no tokens are captured" in answered_by(ENDPOINT)
        with pytest.raises(ConfigError, match="logprobs are not known"):
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
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "tokenizer.json").write_text("{}")
    return directory
