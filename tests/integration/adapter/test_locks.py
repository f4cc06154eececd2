"""Rows that somebody else has locked, and clients that leave in the middle of a statement: nobody else waits, nothing is left behind.

Why here: the order of locks and of cancellations is what no reading of the code shows.
Called by: pytest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store import rollouts, turns
from ratchet.store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_durability import ASK, ask

MORE: Any = [*ASK, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]


async def wait_for_a_lock(database: Database) -> None:
    """Until some transaction waits for another's row."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(900):
        while True:
            async with database.begin() as conn:
                if (await conn.exec_driver_sql(query)).scalar_one():
                    return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def held(opened: Opened) -> AsyncIterator[AsyncConnection]:
    """The rollout and its session as a finalise locks them, which has chains to derive before it commits."""
    async with opened.database.begin() as conn:
        await rollouts.lock_rollout(conn, opened.rollout_id)
        await rollouts.close_sessions(conn, opened.rollout_id)
        yield conn


async def test_a_session_that_a_finalise_holds_holds_up_nobody_else(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    ending, other = await open_rollout(database), await open_rollout(database, 1)
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    await engine.say("fine", "fine")
    completing = asyncio.create_task(ask(adapter, ending.token))
    await engine.wait_for_calls(1)
    async with asyncio.timeout(900), held(ending):
        opening = asyncio.create_task(ask(adapter, ending.token, messages=MORE))
        await wait_for_a_lock(database)
        assert (await ask(adapter, other.token)).status_code == 200
        await engine.release("gate")
        assert (await ask(adapter, other.token, messages=MORE)).status_code == 200
        assert not opening.done() and not completing.done()
    assert {(await one).status_code for one in (opening, completing)} == {401}
    assert [row.state for row in await ending.turns()] == ["aborted"]
    assert [row.state for row in await other.wait_delivered(2)] == ["completed"] * 2


async def test_what_was_written_apart_is_written_once(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """Whoever held the session did not close it: the call goes on."""
    await engine.say("fine")
    async with asyncio.timeout(900):
        with contextlib.suppress(InterruptedError):
            async with held(opened):
                call = asyncio.create_task(ask(adapter, opened.token))
                await wait_for_a_lock(opened.database)
                raise InterruptedError  # rolled back
        assert (await call).json()["choices"][0]["message"]["content"] == "fine"
    assert [(row.state, row.ordinal) for row in await opened.wait_delivered(1)] == [("completed", 0)]


async def test_a_turn_is_opened_while_its_rollout_is_locked(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """It refers to the rollout and holds the session; finalise holds the rollout and takes the session next: neither waits in a circle."""
    await engine.say("fine", "fine")
    assert (await ask(adapter, opened.token)).status_code == 200
    async with asyncio.timeout(900), opened.database.begin() as conn:
        await rollouts.lock_rollout(conn, opened.rollout_id)
        assert (await ask(adapter, opened.token, messages=MORE)).status_code == 200


async def test_a_client_that_leaves_while_its_row_is_made_leaves_a_turn_for_its_retry(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Its new row waited for a lock when it left. The row is generated all the same, and its next retry gets that: no second sample, and
    nothing in flight that nobody works on."""
    await engine.script(
        {"ids": engine.ids("aborted"), "hold": "gate"}, {"ids": engine.ids("kept")}, {"ids": engine.ids("twice")}
    )
    headers = {"authorization": f"Bearer {opened.token}", "x-stainless-retry-count": "1"}
    one, other = (adapter_settings(postgres_url, model_dir, lease_seconds=900.0) for _ in range(2))
    async with adapter_here(one) as address, adapter_here(other) as second, asyncio.timeout(900):
        first = asyncio.create_task(ask(address, opened.token))
        await engine.wait_for_calls(1)
        async with (
            httpx.AsyncClient(base_url=second, headers=headers, timeout=300) as http,
            http.stream("POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}) as reply,
        ):
            received = reply.aiter_bytes()  # kept: the connection ends with it
            await anext(received)  # the call has begun, and waits for that of the other process
            locking = await opened.database.engine.connect()
            await locking.exec_driver_sql(f"SELECT id FROM session WHERE id = {opened.session_id} FOR UPDATE")
            async with opened.database.begin() as conn:
                await turns.abort_turn(conn, (await opened.turns())[0].id)
            await wait_for_a_lock(opened.database)
        await asyncio.sleep(0.5)  # the hang-up arrives
        await locking.close()
        while [row.state for row in await opened.turns()] != ["aborted", "completed"]:
            await asyncio.sleep(0.05)
        for header in ({}, {"x-stainless-retry-count": "2"}):
            assert (await ask(second, opened.token, header)).json()["choices"][0]["message"]["content"] == "kept"
            await opened.wait_delivered(1)
        await engine.release("gate")
        assert (await first).status_code == 401
    assert len((await engine.seen())["calls"]) == 2
