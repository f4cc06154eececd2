"""The real vLLM on a node that shares no path with the learner: weights come from S3, and the canary passes.

`make slow` runs it, in a minute on idle cores.
"""

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import insert, select
from temporalio.testing import ActivityEnvironment

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from engine import weight_storage
from engine.client import EngineClient
from engine.policy_files import describe_files
from ratchet.payloads import SyncInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState
from store.database import Database
from store.schema import MetricTable, PolicyVersionTable
from tests.integration.engine.real_vllm import (
    IDS,
    add_run,
    make_endless_base,
    publish,
    truth,
    wait_for_engine,
    wrapper,
    wrapper_settings,
)
from tests.s3_storage import S3Storage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*"),
]


async def test_an_engine_gets_its_weights_from_s3(
    database: Database, postgres_url: str, s3: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "worker"))
    learner, base = tmp_path / "learner", make_endless_base(tmp_path / "base")
    address = f"{s3.make_bucket(f'weights-{uuid.uuid4().hex[:8]}')}/runs"
    await add_run(database)

    async def store(step: int) -> str:
        version = f"run-1/{step}.e1"
        publish(learner, version, base, seed=step)
        uri, files = weight_storage.version_address(address, version), describe_files(learner / version)
        weight_storage.upload_version(learner / version, uri, files)
        row = {"version": version, "run_id": "run-1", "step": step, "epoch": 1, "uri": uri, "files": files}
        canary = {"ids": IDS, "logprobs": truth(learner / version).tolist()}
        async with database.begin() as connection:
            await connection.execute(insert(PolicyVersionTable).values(**row, canary=canary))
        return version

    one = await store(1)
    settings = wrapper_settings(base, tmp_path, tmp_path / "node" / "policies", postgres_url)
    async with wrapper(settings), EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == one == await client.version()
        np.testing.assert_allclose(await client.score(IDS), truth(learner / one), atol=1e-3)

        two = await store(2)
        sync = LearnActivities(database, RunConfigs(database, load_temporal_settings())).sync
        async with asyncio.timeout(600):
            await ActivityEnvironment().run(sync, SyncInput(run_id="run-1", step=2, engine_id=row.id))
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == two == await client.version() and row.details["canary"]["reason"] is None
        np.testing.assert_allclose(await client.score(IDS), truth(learner / two), atol=1e-3)
    async with database.begin() as connection:
        rows = await connection.execute(select(MetricTable.name, MetricTable.value))
        took = {name: value for name, value in rows}
    assert 0 < took["sync_pause_seconds"] < took["sync_seconds"]
