"""Dumps are written by the service beside the learner, whether or not a command follows the run."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import torch
from sqlalchemy import insert, select, update

from ratchet import paths
from ratchet.errors import ConfigError
from store.database import Database
from store.schema import BatchItemTable, BatchTable, RolloutTable, RunTable
from tests.integration.training.records import make_config, make_group, make_run
from training import service
from training.rollout_dumps import dump_path, request_dumps, wait_for_dumps


async def test_a_run_that_nobody_follows_is_dumped(
    database: Database, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    await make_run(database, "run-a", make_config())
    async with database.begin() as connection:
        group = await make_group(connection, "run-a", 1, [1.0, 0.0])
        row = {"run_id": "run-a", "step": 1}
        await connection.execute(insert(BatchTable).values(**row, members=[], denominators=[], knobs={}, seed=0))
        await connection.execute(insert(BatchItemTable).values(**row, group_id=group, use="trained"))
        await connection.execute(update(RolloutTable).values(ended_at=RolloutTable.created_at, num_chains=1))
        ids = set((await connection.execute(select(RolloutTable.id))).scalars())
    request_dumps("run-a", dump_path(str(tmp_path / "dumps" / "rollout_{rollout_id}.pt")))
    keeper = asyncio.create_task(service._keep_dumps(postgres_url))
    written = tmp_path / "dumps" / "rollout_1.pt"
    async with asyncio.timeout(120):
        while not written.exists():
            await asyncio.sleep(0.05)
        assert {one["rollout_id"] for one in torch.load(written, weights_only=True)["samples"]} == ids
        assert (paths.dump_requests() / "run-a").exists(), "the run goes on"
        async with database.begin() as connection:
            await connection.execute(update(RunTable).values(state="done"))
        await wait_for_dumps("run-a", print)
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper


def test_a_directory_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="dumps cannot be written there"):
        dump_path(str(tmp_path / "file" / "rollout_{rollout_id}.pt"))
