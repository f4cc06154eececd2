"""The page of a step says whose loss it was, a page of rollouts at a time."""

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


async def test_rollouts_are_paged_and_each_is_found(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    copies = (
        "INSERT INTO rollout (run_id, group_id, task_id, member, purpose, workflow_id, owner, attempt, harness,"
        " temperature, outcome, reward) SELECT run_id, group_id, task_id, n, purpose, 'copy/' || n, owner, attempt,"
        f" harness, temperature, outcome, reward FROM rollout, generate_series(10, 129) n WHERE id = {filled.solved}"
        " RETURNING id"
    )
    plan = update(BatchTable).where(BatchTable.run_id == filled.run_id, BatchTable.step == 1)
    async with database.begin() as connection:
        ids = list((await connection.exec_driver_sql(copies)).scalars())
        share = {"advantage": 0.1, "num_tokens": 8, "reward": 1.0}
        members = [{"rollout_id": one, "weight": 1 / at, **share} for at, one in enumerate(ids, 1)]
        await connection.execute(plan.values(members=members))
    shown: list[int] = []
    address: str | None = f"/runs/{filled.run_id}/steps/1"
    while address:
        path, _, query = address.partition("?")
        page = (await client.get(f"{path}.json?{query}")).json()
        shown += [one["rollout"]["id"] for one in page["members"]]
        assert len(page["members"]) <= 50 and page["num_members"] == len(ids)
        address = page["next_page"]
    assert shown == ids, "by share"
    path = f"/runs/{filled.run_id}/steps/1"
    html = (await client.get(f"{path}?rollout={ids[70]}")).text
    assert f'id="rollout-{ids[70]}"' in html and "Rollouts 51 to 100 of 120." in html
    assert "first=0" in html and "first=100" in html
    assert html.index('id="groups"') < html.index('id="tokens"') < html.index('id="members"')
