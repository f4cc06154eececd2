"""The policy that a chat talks with: that of an open run, or a step that the engines have, and no other."""

from pathlib import Path

import pytest
from sqlalchemy import insert, update

from client.chat import chat_values, served_config
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import policy_version
from stack.parts import Stack
from store.database import Database
from store.schema import EngineTable, PolicyVersionTable, RunTable
from tests.integration.training.records import make_config, make_run


async def test_a_step_that_the_engines_have_is_not_loaded_again(
    database: Database, run_id: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    config = make_config()
    await make_run(database, run_id, config, model)
    version = policy_version(run_id, 2, 0)
    async with database.begin() as connection:
        published = {"version": version, "run_id": run_id, "step": 2, "epoch": 0, "uri": "unused", "files": []}
        await connection.execute(insert(PolicyVersionTable).values(published))
        engine = {"address": "http://127.0.0.1:1", "state": "ready", "version": version, "model_path": str(model)}
        await connection.execute(insert(EngineTable).values(engine))

    async def asked(what: str) -> RunConfig:
        return await served_config(Stack(tmp_path), what, None, "anna", print)

    assert await asked(run_id) == config, "the run is open"
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(state="done", step=2))
    assert await asked(run_id) == await asked(f"{run_id}@2") == await asked(f"run/{run_id}") == config
    for what, problem in (
        (f"{run_id}@1", "no weights of step 1; its newest are 2"),
        ("nothing@2", "is no config file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            await asked(what)


def test_a_chat_lasts_long_and_leaves_the_rest_of_the_config_alone() -> None:
    config = make_config(limits={"agent_seconds": 120, "guard_seconds": 200}, harness={"max_turns": 4}, init_from="r@3")
    values = RunConfig.model_validate(chat_values(config))
    assert (values.limits.agent_seconds, values.limits.guard_seconds, values.harness.max_turns) == (1800, None, None)
    assert chat_values(make_config(limits={"agent_seconds": 7200}))["limits"]["agent_seconds"] == 7200
    assert values.init_from is None and values.sampling == config.sampling and values.datasets == config.datasets
