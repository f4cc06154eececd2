"""Live pages hear of changes, over a real connection to the viewer's process-like server."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from stack.ports import free_port
from store.database import Database
from store.schema import RolloutTable
from tests.integration.viewer.filled_store import FilledRun
from viewer import live
from viewer.app import ViewerServer
from viewer.settings import ViewerSettings


@pytest.fixture
async def address(database: Database) -> AsyncIterator[str]:
    settings = ViewerSettings(database.url, port=free_port())
    server = ViewerServer(settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield settings.address
    server.should_exit = True
    await serving


async def test_an_open_page_hears_that_its_rollout_has_ended(
    address: str, filled: FilledRun, database: Database
) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for path in (f"/live/rollouts/{filled.running}", f"/live/runs/{filled.run_id}"):
            async with client.stream("GET", address + path) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                lines = stream.aiter_lines()
                assert await anext(lines) == "retry: 3000"
                for change in (None, "cancelled"):  # the first event is sent at once, the second after a change
                    if change is not None:
                        await set_outcome(database, filled.running, change)
                    while await anext(lines) != "event: changed":
                        pass
            await set_outcome(database, filled.running, None)


async def set_outcome(database: Database, rollout_id: int, outcome: str | None) -> None:
    async with database.begin() as connection:
        await connection.execute(
            RolloutTable.__table__.update().where(RolloutTable.id == rollout_id).values(outcome=outcome)
        )


async def test_too_many_open_pages_are_refused(
    address: str, filled: FilledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_MAX_STREAMS", 1)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
        client.stream("GET", address + "/live/runs") as first,
    ):
        assert await anext(first.aiter_lines()) == "retry: 3000"
        assert (await client.get(address + "/live/runs")).status_code == 503
        assert (await client.get(address + "/runs")).status_code == 200
