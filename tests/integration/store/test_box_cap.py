"""The adaptive limit in the store: one change at a time, from what the rows say."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import func, insert, text, update

from ratchet.types import SandboxRole, SandboxState
from store import box_cap
from store.box_cap import MachineLoad
from store.database import Database
from store.sandboxes import NewSandbox, reserve_sandbox
from store.schema import EngineTable, RunTable, SandboxTable
from tests.integration.training.records import make_config, make_run

CONFIG = make_config(sandbox={"max_boxes": 64, "adaptive": True}, engine={"max_num_seqs": 8})


async def adapt(database: Database, run_id: str, free_memory: float = 0.5) -> int:
    async with database.begin() as connection:
        return await box_cap.adapt_cap(connection, run_id, CONFIG, "p", MachineLoad(free_memory, 0.0))


async def cause(database: Database, run_id: str) -> str:
    async with database.begin() as connection:
        found = await box_cap.read_cap(connection, run_id)
    assert found is not None
    return found.cause


async def make_due(database: Database, run_id: str) -> None:
    """Let the last change be long ago."""
    async with database.begin() as connection:
        earlier = func.now() - text("interval '1 hour'")
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(box_cap_at=earlier))


async def lower(database: Database, run_id: str, limit: int) -> None:
    """Let the limit have become this one just now."""
    async with database.begin() as connection:
        values = {"box_cap": limit, "box_cap_cause": "it was full", "box_cap_at": func.now()}
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values))


async def add_boxes(database: Database, count: int, **more: Any) -> None:
    row = {"provider": "p", "attempt": 1, "workflow_id": "w", "image": "i", "state": SandboxState.LIVE}
    async with database.begin() as connection:
        await connection.execute(insert(SandboxTable), [row | {"role": SandboxRole.AGENT} | more] * count)


async def fill(database: Database, run_id: str) -> int:
    """Return how many agents' boxes are granted under the limit; they are."""
    new = NewSandbox(provider="p", role=SandboxRole.AGENT, rollout_id=None, attempt=1, workflow_id="w", image="i")
    limit, count = await adapt(database, run_id), 0
    while True:
        async with database.begin() as connection:
            if await reserve_sandbox(connection, new, limit, 1000) is None:
                return count
        count += 1


@pytest.fixture
async def run(database: Database, run_id: str) -> str:
    await make_run(database, run_id, CONFIG)
    return run_id


async def test_it_grows_by_one_step_however_many_boots_ask(database: Database, run: str) -> None:
    async with database.begin() as connection:
        assert await box_cap.read_cap(connection, run) is None
    assert await adapt(database, run) == 64
    await lower(database, run, 16)
    assert await fill(database, run) == 15, "one is reserved for grading"
    assert await adapt(database, run) == 16, "the last change was just now"
    await make_due(database, run)
    assert set(await asyncio.gather(*(adapt(database, run) for _ in range(20)))) <= {16, 24}
    assert await adapt(database, run) == 24 and "grows" in await cause(database, run)


async def test_a_limit_that_holds_nothing_back_stays(database: Database, run: str) -> None:
    await lower(database, run, 16)
    await add_boxes(database, 5)
    await make_due(database, run)
    assert await adapt(database, run) == 16


async def test_refusals_and_memory_shrink_it(database: Database, run: str) -> None:
    await lower(database, run, 16)
    await add_boxes(database, 14)
    await add_boxes(database, 2, state=SandboxState.CREATING, boot_error="")
    await make_due(database, run)
    assert await adapt(database, run) == 12 and "no room for 2 boxes" in await cause(database, run)
    await make_due(database, run)
    assert await adapt(database, run, free_memory=0.01) == 12 and "still in use" in await cause(database, run)


async def test_a_smaller_limit_of_the_config_counts_at_once(database: Database, run: str) -> None:
    await adapt(database, run)
    smaller = CONFIG.model_copy(update={"sandbox": CONFIG.sandbox.model_copy(update={"max_boxes": 6})})
    async with database.begin() as connection:
        assert await box_cap.adapt_cap(connection, run, smaller, "p", MachineLoad(0.5, 0.0)) == 6


async def test_calls_are_compared_with_the_slots_of_ready_engines(database: Database, run: str) -> None:
    async with database.begin() as connection:
        values = {"address": "a", "state": "ready", "model_path": "", "heartbeat_at": func.now()}
        await connection.execute(insert(EngineTable).values(**values))
        await connection.execute(insert(EngineTable).values(**values | {"address": "b", "engine_set": "b"}))
        load = await box_cap.read_load(connection, run, CONFIG, "p", MachineLoad(0.5, 0.0))
    assert (load.engine_slots, load.calls, load.boxes) == (8, 0, 0)


async def test_open_runs_with_a_limit_of_their_own(database: Database, run: str) -> None:
    async with database.begin() as connection:
        assert await box_cap.open_caps(connection) == []
    assert await adapt(database, run) == 64
    async with database.begin() as connection:
        assert await box_cap.open_caps(connection) == [], "it holds nothing back"
    await lower(database, run, limit := 16)
    async with database.begin() as connection:
        (found,) = await box_cap.open_caps(connection)
        assert (found.run_id, found.cap.limit, found.max_boxes) == (run, limit, 64)
        await connection.execute(update(RunTable).values(state="done"))
        assert await box_cap.open_caps(connection) == []
