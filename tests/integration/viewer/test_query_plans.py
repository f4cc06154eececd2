"""No page reads a whole table, on a store of 60,000 rollouts and with statistics of 10⁶ rollouts and 10⁸ turns."""

import httpx
import pytest
from sqlalchemy import text

from ratchet.store.arrays import pack_json
from ratchet.store.database import Database
from tests.integration.ratchet.store.test_query_plans import explaining, fake_statistics, store
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

__all__ = ["store"]


@pytest.mark.parametrize("is_larger", [False, True], ids=["as it is", "10⁸ turns"])
async def test_no_page_reads_a_whole_table(store: Database, run_id: str, is_larger: bool) -> None:
    async with store.begin() as connection:
        rows = await connection.execute(
            text("SELECT id, group_id, task_id FROM rollout WHERE run_id = :run ORDER BY id DESC LIMIT 40 OFFSET 100"),
            {"run": run_id},
        )
        rollout = rows.first()
        assert rollout is not None
        request = pack_json({"after": None, "messages": [{"role": "user", "content": "hello"}]})
        await connection.execute(
            text("UPDATE turn SET request = :request WHERE rollout_id > :low"),
            {"request": request, "low": rollout.id - 100},
        )
    if is_larger:
        await fake_statistics(store)
    pages = [
        "/runs",
        f"/runs/{run_id}",
        f"/rollouts?run={run_id}",
        f"/rollouts?run={run_id}&outcome=graded&reward_from=0&before={rollout.id}",
        f"/rollouts?run={run_id}&flagged=true",
        f"/rollouts/{rollout.id}",
        f"/rollouts/{rollout.id}/tokens",
        f"/rollouts/{rollout.id}/attempts/1",
        f"/groups/{rollout.group_id}",
    ]
    app = create_viewer_app(ViewerSettings(store.url))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client,
    ):
        await client.get("/health")
        with explaining(app.state.store.database) as found:
            for page in pages:
                answer = await client.get(page)
                assert answer.status_code == 200, f"{page}: {answer.text[:500]}"
    assert len(found) > 30
    whole = {" ".join(statement.split())[:300]: tables for statement, tables in found.items() if tables}
    assert not whole, "\n".join(f"{tables}: {one}" for one, tables in whole.items())
