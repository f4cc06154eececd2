"""The page of a step says whose loss it was."""

import httpx
import pytest
from sqlalchemy import update

from store.database import Database
from store.schema import BatchTable
from tests.integration.viewer.filled_store import FilledRun


async def test_shares_of_the_loss(client: httpx.AsyncClient, database: Database, filled: FilledRun) -> None:
    plan = update(BatchTable).where(BatchTable.run_id == filled.run_id, BatchTable.step == 1)
    heavy = {"rollout_id": filled.unsolved, "advantage": -0.9, "num_tokens": 20, "weight": 0.02, "reward": 0.0}
    light = {"rollout_id": filled.solved, "advantage": 0.1, "num_tokens": 80, "weight": 0.005, "reward": 1.0}
    async with database.begin() as connection:
        await connection.execute(plan.values(members=[light, heavy]))
    address = f"/runs/{filled.run_id}/steps/1"
    members = (await client.get(f"{address}.json")).json()["members"]
    assert [one["rollout"]["id"] for one in members] == [filled.unsolved, filled.solved], "the largest share first"
    assert [one["share"] for one in members] == pytest.approx([0.9, 0.1])
    html = (await client.get(address)).text
    assert ">90%<" in html and "It is not the norm of the gradient" in html
    assert f"/rollouts/{filled.unsolved}/tokens?colour=ratio&trained_by={filled.run_id}" in html
