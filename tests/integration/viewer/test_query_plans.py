"""No page reads what belongs to other runs: a small run in a store of 60,000 other rollouts, and the same with the
statistics of 10⁶ rollouts and 10⁸ turns.

What a page counts of its own run grows with that run; `tests/benchmarks/viewer.py` measures it.
"""

from pathlib import Path

import httpx

from store.database import Database
from tests.integration.store.test_query_plans import explaining, fake_statistics, store
from tests.integration.viewer.filled_store import fill_run
from tests.integration.viewer.test_pages import pages_of
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

__all__ = ["store"]


async def test_no_page_reads_a_whole_table(store: Database, model: Path) -> None:
    filled = await fill_run(store, "small-run", model)
    async with store.engine.connect() as plain:
        await (await plain.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql("ANALYZE")
    pages = [*pages_of(filled), f"/rollouts?run={filled.run_id}&flagged=true", "/rollouts", "/metrics"]
    await require_indexes(store, pages)
    await fake_statistics(store)
    await require_indexes(store, pages)


async def require_indexes(store: Database, pages: list[str]) -> None:
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
    assert len(found) > 40
    whole = {" ".join(statement.split())[:300]: tables for statement, tables in found.items() if tables}
    assert not whole, "\n".join(f"{tables}: {one}" for one, tables in whole.items())
