"""An adapter that is started while the store cannot be used: it listens, says so, and holds calls."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from adapter.app import serve_adapter
from ratchet.errors import MachineError
from store.database import Database
from tests.integration.adapter.conftest import (
    ScriptedEngine,
    adapter_process,
    adapter_settings,
    cut_off,
    open_rollout,
)
from tests.integration.adapter.test_durability import ask, let_adapters_run


async def execute(database: Database, statement: str) -> None:
    async with database.begin() as conn:
        await conn.execute(text(statement))


async def status(address: str) -> str:
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        found: str = (await http.get("/health")).json()["status"]
    return found


async def test_calls_are_held_until_the_store_comes_and_has_the_schema(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, database: Database
) -> None:
    """Each session has its own limit, although none is known yet."""
    limits: Any = {"max_held_calls_per_session": 1}
    first, second = await open_rollout(database), await open_rollout(database, 1)
    await engine.say("one", "two")
    async with cut_off(postgres_url) as (url, line):
        line.cut()
        settings = adapter_settings(url, model_dir, **limits)
        address = f"http://{settings.host}:{settings.port}"
        async with adapter_process(settings), asyncio.timeout(300):
            assert await status(address) == "calls wait for the store"
            asking = [asyncio.create_task(ask(address, one.token)) for one in (first, second)]
            await let_adapters_run(address)
            assert (await ask(address, first.token)).status_code == 503, "the limit is one call"
            await execute(database, "ALTER TABLE alembic_version RENAME TO migrating")
            try:
                line.mend()
                await asyncio.wait(asking, timeout=1)
                assert await status(address) == "calls wait for the store", "the schema has no revision yet"
            finally:
                await execute(database, "ALTER TABLE migrating RENAME TO alembic_version")
            assert [(await one).status_code for one in asking] == [200, 200]
            while await status(address) != "ok":
                await asyncio.sleep(0.05)
            line.cut()
            while await status(address) != "calls wait for the store":  # the heartbeat finds it
                await asyncio.sleep(0.05)


async def test_a_schema_of_a_later_version_ends_the_process(
    postgres_url: str, model_dir: Path, database: Database
) -> None:
    await execute(database, "UPDATE alembic_version SET version_num = '9' || version_num")
    try:
        with pytest.raises(MachineError, match=r"9\d{4}, which is later"):
            await asyncio.wait_for(serve_adapter(adapter_settings(postgres_url, model_dir)), 60)
    finally:
        await execute(database, "UPDATE alembic_version SET version_num = substr(version_num, 2)")
