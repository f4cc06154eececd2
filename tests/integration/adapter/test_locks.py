"""Rows locked by other transactions, and clients that disconnect during a statement: no other call waits, and nothing
is left behind.

Mistakes in the order of locks and cancellations cannot be found by reading the code.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncConnection

from adapter.store_outage import StoreOutage
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from ratchet.types import TurnKind
from store import rollouts, turns
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_durability import ASK, ask

MORE: Any = [*ASK, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]


async def wait_for_a_lock(database: Database) -> None:
    """Wait until a transaction waits for a row that another one has locked."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(900):
        while True:
            async with database.begin() as conn:
                if (await conn.exec_driver_sql(query)).scalar_one():
                    return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def locked_by_finalise(opened: Opened) -> AsyncIterator[AsyncConnection]:
    """Lock the rollout and its session, as a finalise does until it has built the chains and commits."""
    async with opened.database.begin() as conn:
        await rollouts.lock_rollout(conn, opened.rollout_id)
        await rollouts.close_sessions(conn, opened.rollout_id)
        yield conn


async def test_a_session_that_a_finalise_has_locked_delays_no_other_session(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    ending, other = await open_rollout(database), await open_rollout(database, 1)
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    await engine.say("fine", "fine")
    completing = asyncio.create_task(ask(adapter, ending.token))
    await engine.wait_for_calls(1)
    async with asyncio.timeout(900), locked_by_finalise(ending):
        opening = asyncio.create_task(ask(adapter, ending.token, messages=MORE))
        await wait_for_a_lock(database)
        assert (await ask(adapter, other.token)).status_code == 200
        await engine.release("gate")
        assert (await ask(adapter, other.token, messages=MORE)).status_code == 200
        assert not opening.done() and not completing.done()
    assert {(await one).status_code for one in (opening, completing)} == {401}
    assert [row.state for row in await ending.turns()] == ["aborted"]
    assert [row.state for row in await other.wait_delivered(2)] == ["completed"] * 2


async def test_a_write_that_waited_for_a_lock_is_written_once(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """The transaction that had locked the session is rolled back, so the call goes on."""
    await engine.say("fine")
    async with asyncio.timeout(900):
        with contextlib.suppress(InterruptedError):
            async with locked_by_finalise(opened):
                call = asyncio.create_task(ask(adapter, opened.token))
                await wait_for_a_lock(opened.database)
                raise InterruptedError  # rolled back
        assert (await call).json()["choices"][0]["message"]["content"] == "fine"
    assert [(row.state, row.ordinal) for row in await opened.wait_delivered(1)] == [("completed", 0)]


async def test_a_wait_for_an_engine_that_is_noted_while_others_are_written_is_kept(opened: Opened) -> None:
    database = opened.database
    waits = EngineWaits(database, EngineRouter(database), StoreOutage(database))
    query = f"SELECT engine_wait_seconds FROM session WHERE id = {opened.session_id}"
    try:
        async with asyncio.timeout(900):
            async with database.begin() as conn:
                await conn.exec_driver_sql("LOCK TABLE session IN SHARE MODE")
                waits.add(1, opened.session_id)
                await wait_for_a_lock(database)  # behind the statement that has taken the waits so far
                waits.credit(1, 1000.0)
            seconds = 0.0
            while seconds < 0.5:  # written
                async with database.begin() as conn:
                    seconds = (await conn.exec_driver_sql(query)).scalar_one()
            assert opened.session_id in waits._unstored or seconds >= 1000
    finally:
        waits.close()


async def test_a_turn_is_opened_while_its_rollout_is_locked(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """The insert refers to the rollout and locks the session; a finalise locks the rollout, then the session.

    No deadlock.
    """
    await engine.say("fine", "fine")
    assert (await ask(adapter, opened.token)).status_code == 200
    async with asyncio.timeout(900), opened.database.begin() as conn:
        await rollouts.lock_rollout(conn, opened.rollout_id)
        assert (await ask(adapter, opened.token, messages=MORE)).status_code == 200


async def test_a_client_that_disconnects_during_the_insert_leaves_a_turn_for_its_retry(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Its new row waited for a lock when it disconnected.

    The row is generated all the same, and the next retry gets its answer.

    There is no second sample, and no row in flight without a process that generates it.
    """
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
            received = reply.aiter_bytes()  # a reference, because the connection ends with it
            await anext(received)  # the call has begun and waits for the other process's call
            locking = await opened.database.engine.connect()
            await locking.exec_driver_sql(f"SELECT id FROM session WHERE id = {opened.session_id} FOR UPDATE")
            async with opened.database.begin() as conn:
                await turns.abort_turn(conn, (await opened.turns())[0].id)
            await wait_for_a_lock(opened.database)
        await asyncio.sleep(0.5)  # time for the disconnect to arrive
        await locking.close()
        while [row.state for row in await opened.turns()] != ["aborted", "completed"]:
            await asyncio.sleep(0.05)
        for header in ({}, {"x-stainless-retry-count": "2"}):
            assert (await ask(second, opened.token, header)).json()["choices"][0]["message"]["content"] == "kept"
            await opened.wait_delivered(1)
        await engine.release("gate")
        assert (await first).status_code == 401
    assert len((await engine.seen())["calls"]) == 2


def _new_turn(opened: Opened) -> turns.NewTurn:
    return turns.NewTurn(
        session_id=opened.session_id,
        rollout_id=opened.rollout_id,
        attempt=1,
        lane="",
        digest=b"digest",
        ordinal=0,
        kind=TurnKind.MAIN,
        parent_turn_id=None,
        kept_tokens=0,
        fork_cause=None,
        dialect="chat",
        prompt_tokens=1,
        suffix_ids=b"1234",
        temperature=1.0,
        request=b"request",
        engine_id=None,
        lease_owner="me",
    )


def _completed(opened: Opened, turn_id: int) -> turns.CompletedTurn:
    return turns.CompletedTurn(
        id=turn_id,
        session_id=opened.session_id,
        sampled_ids=b"1234",
        logprobs=b"1234",
        num_sampled=1,
        logprobs_valid=True,
        version_spans=[],
        finish_reason="stop",
        answer=b"answer",
        engine_id=None,
        engine_wait_seconds=0.0,
    )


async def test_a_write_sees_what_was_committed_while_it_waited(opened: Opened, database: Database) -> None:
    """The statement reads the rows as they were when it began; a locked row is read again once it is free."""
    (turn_id,) = (await turns.write_turns(database, [_new_turn(opened)], [], [])).opened
    assert turn_id is not None
    async with asyncio.timeout(900):
        async with database.begin() as conn:
            await turns.attach_client(conn, turn_id, "another process")
            writing = asyncio.create_task(turns.write_turns(database, [], [_completed(opened, turn_id)], []))
            await wait_for_a_lock(database)
        assert (await writing).completed == [True]
        assert [(row.state, row.lease_owner) for row in await opened.turns()] == [("completed", "another process")]


async def test_a_write_that_waited_for_a_seal_writes_nothing(opened: Opened, database: Database) -> None:
    (turn_id,) = (await turns.write_turns(database, [_new_turn(opened)], [], [])).opened
    assert turn_id is not None
    completed = [_completed(opened, turn_id)]
    again = [replace(_new_turn(opened), ordinal=1)]
    async with asyncio.timeout(900):
        async with locked_by_finalise(opened):
            busy = await turns.write_turns(database, again, completed, [])
            assert (busy.opened, busy.completed, busy.busy) == ([None], [False], {opened.session_id})
            writing = asyncio.create_task(turns.write_turns(database, again, completed, [], wait=True))
            await wait_for_a_lock(database)
        written = await writing
    assert (written.opened, written.completed, written.busy) == ([None], [False], frozenset())
    assert [row.state for row in await opened.turns()] == ["aborted"]
