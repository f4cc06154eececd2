"""Two engine sets in one store: no version and no call of one ever gets to an engine of the other.

The wrappers are the product's; their vLLM is the scripted engine.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from engine.client import EngineClient
from engine.wrapper import EngineWrapper
from ratchet.errors import EngineUnavailableError
from ratchet.types import EngineState
from stack.ports import free_port
from store import engines
from store.database import Database
from store.engines import EngineRow
from store.schema import EngineLoadTable, EngineTable
from tests.integration.adapter.conftest import adapter_here, adapter_settings, engine_process, open_rollout
from tests.integration.engine.test_several_engines import Fleet, ask, fleet, model_dir, seen

__all__ = ["fleet", "model_dir"]
RUNS = {"a": "run-a", "b": "run-b"}


async def open_runs_of_both(database: Database) -> dict[str, list[Any]]:
    """Return three open rollouts of a run of each set."""
    opened: dict[str, list[Any]] = {}
    for name, run_id in RUNS.items():
        numbers = range(3 * len(opened), 3 * len(opened) + 3)
        opened[name] = [await open_rollout(database, number, run_id, name) for number in numbers]
    return opened


async def ready_of(fleet: Fleet, name: str, number: int = 1) -> list[EngineRow]:
    async with asyncio.timeout(300):
        while True:
            async with fleet.database.begin() as connection:
                rows = await engines.ready_engines(connection, name)
            if len(rows) == number:
                return rows
            await asyncio.sleep(0.05)


async def loads(database: Database) -> set[tuple[str, str]]:
    """Return which versions engines of which sets have ever loaded."""
    async with database.begin() as connection:
        joined = select(EngineTable.engine_set, EngineLoadTable.version).join(
            EngineLoadTable, EngineLoadTable.engine_id == EngineTable.id
        )
        return {(row.engine_set, row.version) for row in await connection.execute(joined)}


async def test_calls_and_versions_stay_within_their_set(fleet: Fleet, postgres_url: str, model_dir: Path) -> None:
    """An engine of `b` starts beside newer versions of the other run, is killed with all its kind, and comes back."""
    opened = await open_runs_of_both(fleet.database)
    port = free_port()
    async with (
        asyncio.timeout(300),
        fleet.engine(engine_set="a"),
        adapter_here(adapter_settings(postgres_url, model_dir)) as adapter,
    ):
        [of_a] = await ready_of(fleet, "a")
        async with fleet.engine(engine_set="b", port=port) as killed:
            [of_b] = await ready_of(fleet, "b")
            for name in ("a", "b"):
                assert {await ask(adapter, one.token) for one in opened[name]} == {200}
            for row in (of_a, of_b):
                assert len((await seen(row.address))["calls"]) == 3
            killed.kill()
            await asyncio.to_thread(killed.wait)
        async with fleet.database.begin() as connection:  # so that no call waits until it counts as silent
            silent = {"heartbeat_at": func.now() - text("interval '60 seconds'")}
            await connection.execute(update(EngineTable).where(EngineTable.id == of_b.id).values(**silent))
        await fleet.publish(7, run_id=RUNS["a"])
        waiting = asyncio.create_task(ask(adapter, opened["b"][0].token, "wait"))
        assert {await ask(adapter, one.token, "again") for one in opened["a"]} == {200}, "calls of the other set go on"
        assert not waiting.done() and len((await seen(of_a.address))["calls"]) == 6
        newest = await fleet.publish(1, run_id=RUNS["b"])
        async with fleet.engine(engine_set="b", port=port):
            [back] = await ready_of(fleet, "b")
            assert (back.id, back.version) == (of_b.id, newest), "not the higher step of the other run"
            assert await waiting == 200
            assert len((await seen(of_a.address))["calls"]) == 6
    assert await loads(fleet.database) == {("b", newest)}


@pytest.mark.parametrize("pause", [None, "lapsed"])
async def test_an_engine_that_missed_versions_loads_its_own(fleet: Fleet, pause: str | None) -> None:
    """After a silence, and when it takes over a pause whose holder has died."""
    await open_runs_of_both(fleet.database)
    for name, step in (("a", 9), ("b", 2)):
        await fleet.publish(step, run_id=RUNS[name])
    async with asyncio.timeout(300), engine_process() as (address, _), EngineClient(address) as client:
        settings = fleet.settings(int(address.rpartition(":")[2]), engine_set="b")
        wrapper = EngineWrapper(settings, fleet.database, client, asyncio.Event())
        async with fleet.database.begin() as connection:
            wrapper.engine_id = await engines.register_engine(connection, address, "", {}, "b")
            ready = {"state": EngineState.READY} if pause is None else {"state": EngineState.SYNCING}
            await connection.execute(update(EngineTable).values(**ready))
        wrapper.is_up = True
        if pause is None:
            wrapper.heartbeat_at = float("-inf")
        await wrapper._heartbeat()
        async with fleet.database.begin() as connection:
            [row] = await engines.list_engines(connection, "b")
        assert (row.state, row.version) == (EngineState.READY, "run-b/2.e1") and await client.version() == row.version
    assert await loads(fleet.database) == {("b", "run-b/2.e1")}


async def test_an_address_that_passes_to_another_set_leaves_the_old_row_behind(database: Database) -> None:
    """An update, a lease and a call that were meant for the engine before find that it is gone."""
    async with database.begin() as connection:
        before = await engines.register_engine(connection, "http://127.0.0.1:1", "m", {}, "a")
        await engines.set_engine_state(connection, before, EngineState.STARTING, EngineState.READY)
        assert await engines.begin_engine_pause(connection, before, 60)
        with pytest.raises(EngineUnavailableError, match="is still updated for engine set a, for at most 60 s"):
            await engines.register_engine(connection, "http://127.0.0.1:1", "m", {}, "b")
        await connection.execute(update(EngineTable).values(paused_until=func.now()))
        after = await engines.register_engine(connection, "http://127.0.0.1:1", "m", {}, "b")
        await engines.set_engine_state(connection, after, EngineState.STARTING, EngineState.READY)
    async with database.begin() as connection:
        assert not await engines.end_engine_pause(connection, before, "run-a/1.e1")
        assert not await engines.extend_engine_pause(connection, before, 60)
        assert not await engines.begin_engine_pause(connection, before, 60)
        assert await engines.list_engines(connection, "a") == []
        [row] = await engines.list_engines(connection, "b")
        assert (row.id, row.state, row.version) == (after, EngineState.READY, None) and after != before
        assert await engines.register_engine(connection, "http://127.0.0.1:1", "m", {}, "a") == before
        assert await engines.list_engines(connection, "b") == []
