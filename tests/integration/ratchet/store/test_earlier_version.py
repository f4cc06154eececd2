"""A store and the histories of commit d4e5a70 go on under the present code.

They were taken from its own stack in the middle of work: the run `old-run` has its first step planned and waits for the
learner, and an agent of a rollout that was started by hand waits for its model.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from temporalio.client import Client, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Replayer

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.payloads import PrepareRunInput, TrainRunInput, ViewRunInput
from ratchet.store import open_rollouts, open_runs, reports, rollouts, run_pause, runs, turns
from ratchet.store.database import Database, async_url
from ratchet.store.migration import migrate
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState
from stack.worker import WORKFLOWS
from training.plan_loader import load_sequences, load_step_plan
from training.planner import plan_step

KEPT = Path(__file__).parents[3] / "replay" / "d4e5a70"
RUN_ID = "old-run"
HISTORIES = json.loads(gzip.decompress((KEPT / "histories.json.gz").read_bytes()))


@pytest.fixture(scope="module")
async def old_store(postgres_url: str) -> AsyncIterator[Database]:
    """The kept store, migrated."""
    name = f"kept_{uuid4().hex[:8]}"
    server = create_async_engine(async_url(postgres_url), isolation_level="AUTOCOMMIT")
    async with server.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
        url = postgres_url.rpartition("/")[0] + f"/{name}"
        async with Database(url, pool_size=2) as database:
            async with database.begin() as own:
                driver: Any = (await own.get_raw_connection()).driver_connection
                await driver.execute(gzip.decompress((KEPT / "store.sql.gz").read_bytes()).decode())
                await driver.execute("SET search_path TO public")
            await asyncio.to_thread(migrate, url)
            yield database
        await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    await server.dispose()


async def test_the_run_goes_on(old_store: Database) -> None:
    settings = load_temporal_settings()
    activities = RunActivities(old_store, settings, RunConfigs(old_store, settings), cast(Client, None))
    prepare = PrepareRunInput(input=TrainRunInput(run_id=RUN_ID), run_id=RUN_ID)
    plan = await ActivityEnvironment().run(activities.prepare_run, prepare)
    assert plan.num_steps == 3
    view = await activities.advance_run(ViewRunInput(run_id=RUN_ID))
    assert (view.state, view.step, view.plannable, view.reason) == (RunState.RUNNING, 0, True, "")
    async with old_store.begin() as connection:
        row = await runs.get_run(connection, RUN_ID)
        assert row is not None
        config = read_stored_config(row.config)
        assert await plan_step(connection, RUN_ID, config) == 1, "the step that d4e5a70 planned"
        planned = await load_step_plan(connection, RUN_ID, 1)
        assert planned is not None
        members = [member.rollout_id for member in planned.members]
        sequences = await load_sequences(connection, members, planned.min_policy_step)
    assert {one.rollout_id for one in sequences} == set(members)
    assert {member.reward for member in planned.members} == {0.0, 1.0}


async def test_it_is_recognised_paused_and_resumed(old_store: Database) -> None:
    async with old_store.begin() as connection:
        row = await runs.get_run(connection, RUN_ID)
        assert row is not None
        assert await runs.newest_unfinished_run(connection, read_stored_config(row.config)) == RUN_ID
        await run_pause.pause_run(connection, RUN_ID, "a test")
        assert await open_runs.resume_run(connection, RUN_ID) == "a test"


async def test_the_rollout_at_work_is_known_with_its_turns(old_store: Database) -> None:
    async with old_store.begin() as connection:
        (claimed,) = await rollouts.claimed_and_open(connection)
        shown = await reports.read_rollout(connection, claimed.id)
        assert [turn["state"] for turn in shown["turns"]] == ["in_flight"]
        assert await turns.load_metas(connection, claimed.id, 1) == []
        adhoc = await rollouts.run_of_rollout(connection, claimed.id)
        (stage,) = await open_rollouts.count_open_rollouts(connection, adhoc)
        assert (stage.stage, stage.count) == (open_rollouts.AGENT_WORKS, 1)
        assert len(await reports.list_runs(connection)) == 2


@pytest.mark.parametrize("kept", HISTORIES, ids=lambda kept: kept["workflow_id"])
async def test_open_and_closed_histories_replay(kept: dict[str, Any]) -> None:
    history = WorkflowHistory.from_json(kept["workflow_id"], kept["history"])
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)
