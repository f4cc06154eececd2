"""An engine without heartbeats is not always gone: the store was unavailable, or the engine loads a large policy.

Its calls in flight have used GPU time, and would be cancelled although the engine is healthy.
"""

import asyncio
from pathlib import Path

from sqlalchemy import func, insert, text, update

from adapter.turns.routing import EngineRouter
from engine.client import EngineClient
from engine.policy_files import file_sha256
from engine.process import EngineSettings
from engine.wrapper import EngineWrapper
from ratchet.types import EngineState, SessionState
from store import engines
from store.database import Database
from store.schema import EngineTable, PolicyVersionTable, RunTable
from store.sessions import SessionRow
from tests.integration.adapter.conftest import LIMITS, ScriptedEngine, cut_off

SESSION = SessionRow(1, 1, 1, SessionState.OPEN, 1.0, "policy", LIMITS)


async def change(database: Database, engine: ScriptedEngine, **values: object) -> None:
    async with database.begin() as conn:
        await conn.execute(update(EngineTable).where(EngineTable.id == engine.id).values(**values))


async def test_missing_heartbeats_count_only_while_the_store_was_available(
    database: Database, postgres_url: str, engine: ScriptedEngine
) -> None:
    long_ago = func.now() - text("interval '30 seconds'")
    async with cut_off(postgres_url) as (url, line), Database(url) as through_line, asyncio.timeout(300):
        router = EngineRouter(through_line)
        await router.pick(SESSION)
        line.cut()
        router.avoid(engine.id)
        await router.pick(SESSION)  # from the last view, because the store is unavailable
        await change(database, engine, heartbeat_at=long_ago)
        line.mend()
        gone = asyncio.create_task(router.wait_until_gone(engine.id))
        while router.serves(engine.id):  # until the store has been read again
            await asyncio.sleep(0.02)
        await asyncio.sleep(0)
        assert not gone.done(), "its calls must go on"
        await change(database, engine, state=EngineState.STARTING)
        await gone
        await change(database, engine, state=EngineState.READY)
        await EngineRouter(database).wait_until_gone(engine.id)  # a router whose store was available returns at once


async def test_an_engine_sends_heartbeats_while_it_loads(
    database: Database, postgres_url: str, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """After missed heartbeats it first catches up, out of service, and sends heartbeats for as long as that takes."""
    directory = tmp_path / "policies" / "run-1" / "1.e1"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    files = [{"name": "model.safetensors", "sha256": file_sha256(directory / "model.safetensors"), "bytes": 7}]
    async with database.begin() as conn:
        run = {"run_id": "run-1", "config": {}, "config_digest": "", "config_name": "", "seed": 0, "model_path": ""}
        await conn.execute(insert(RunTable).values(**run))
        version = {
            "version": "run-1/1.e1",
            "run_id": "run-1",
            "step": 1,
            "epoch": 1,
            "uri": str(directory),
            "files": files,
        }
        await conn.execute(insert(PolicyVersionTable).values(**version))
    await change(database, engine, heartbeat_at=func.now() - text("interval '30 seconds'"))
    await engine.hold_updates()
    settings = EngineSettings(
        model_path=tmp_path, port=1, database_url=postgres_url, state_dir=tmp_path, policies_root=tmp_path / "policies"
    )
    async with EngineClient(engine.address) as client, asyncio.timeout(300):
        wrapper = EngineWrapper(settings, database, client, asyncio.Event())
        wrapper.engine_id = engine.id
        wrapper.is_up = True
        wrapper.heartbeat_at = float("-inf")
        beat = asyncio.create_task(wrapper._heartbeat())
        while True:
            async with database.begin() as conn:
                row = await engines.get_engine(conn, engine.id)
            assert row is not None and not beat.done()
            if row.silent_seconds < engines.SILENT_SECONDS and (await engine.seen())["updates"]:
                break
            await asyncio.sleep(0.02)
        assert row.state is EngineState.SYNCING
        await engine.release("update")
        await beat
        async with database.begin() as conn:
            row = await engines.get_engine(conn, engine.id)
        assert row is not None and (row.state, row.version) == (EngineState.READY, "run-1/1.e1")
