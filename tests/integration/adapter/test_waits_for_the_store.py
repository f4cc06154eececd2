"""Time in which a session's calls cannot be answered because of us is not its agent's, also if other calls go on.

Another transaction holds the row of the session or of a turn, or one of several adapters has lost the store.
"""

import asyncio
import contextlib
from pathlib import Path

import pytest
from sqlalchemy import insert, text, update

from store import adapters, sessions
from store.database import Database
from store.schema import AdapterProcessTable, SessionTable, TurnTable
from store.sessions import SessionProgress
from tests.integration.adapter.conftest import (
    Opened,
    ScriptedEngine,
    adapter_here,
    adapter_settings,
    cut_off,
    open_rollout,
)
from tests.integration.adapter.test_durability import ASK, ask
from tests.integration.adapter.test_locks import wait_for_a_lock

LONG_SECONDS = 0.3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapter.turns.engine_waits._LONG_SECONDS", LONG_SECONDS)


async def progress(opened: Opened) -> SessionProgress:
    key = (opened.rollout_id, 1)
    async with opened.database.begin() as connection:
        return (await sessions.read_progress(connection, [key]))[key]


async def wait_until_waited(opened: Opened, seconds: float) -> None:
    async with asyncio.timeout(300):
        while (await progress(opened)).waited_seconds < seconds:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("table", [SessionTable, TurnTable])
async def test_a_call_that_waits_for_a_row_has_waited_when_it_gets_through(
    adapter: str, engine: ScriptedEngine, opened: Opened, table: type[SessionTable] | type[TurnTable]
) -> None:
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    call = asyncio.create_task(ask(adapter, opened.token))
    await engine.wait_for_calls(1)
    async with opened.database.begin() as holder:
        row = table.id == (opened.session_id if table is SessionTable else (await opened.turns())[0].id)
        await holder.execute(table.__table__.select().where(row).with_for_update())
        await engine.release("gate")
        await wait_for_a_lock(opened.database)
        await asyncio.sleep(LONG_SECONDS)
    assert (await call).status_code == 200
    await wait_until_waited(opened, LONG_SECONDS)


async def test_a_call_of_an_adapter_that_alone_has_lost_the_store_has_waited(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Other adapters send heartbeats meanwhile. One call has begun when the store is lost, another one has not."""
    other = await open_rollout(opened.database, 1)
    await engine.script({"ids": engine.ids("one"), "hold": "gate"}, {"ids": engine.ids("first")})
    await engine.say("two")
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        calls = [asyncio.create_task(ask(address, opened.token))]
        await engine.wait_for_calls(1)
        assert (await ask(address, other.token)).status_code == 200
        line.cut()
        await engine.release("gate")
        calls.append(asyncio.create_task(ask(address, other.token, messages=[*ASK, *ASK])))
        async with opened.database.begin() as connection:
            await adapters.heartbeat_adapters(connection)
        await asyncio.sleep(2 * LONG_SECONDS)
        line.mend()
        assert [(await one).status_code for one in calls] == [200, 200]
        for one in (opened, other):
            await wait_until_waited(one, LONG_SECONDS)


async def test_a_call_at_an_adapter_that_is_silent_waits_although_it_cannot_record_that(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    call = asyncio.create_task(ask(adapter, opened.token))
    await engine.wait_for_calls(1)
    turn = update(TurnTable).where(TurnTable.session_id == opened.session_id)
    ended = text("now() - interval '1 minute'")
    async with opened.database.begin() as connection:
        await connection.execute(insert(AdapterProcessTable).values(id="lost", alive_until=ended))
        await connection.execute(turn.values(worker="lost", created_at=text("now() - interval '5 minutes'")))
        await adapters.heartbeat_adapters(connection)
    found = await progress(opened)
    # A busy machine may have let the call wait for the engine, which counts once.
    assert found.silent_seconds + found.engine_wait_seconds >= 60
    assert 0 < found.silent_seconds <= found.waited_seconds
    async with opened.database.begin() as connection:  # its agent has made another call since
        await connection.execute(turn.values(created_at=text("now() - interval '10 seconds'")))
    assert (await progress(opened)).silent_seconds == 0  # a busy machine may have made its first call wait
    await engine.release("gate")
    with contextlib.suppress(AssertionError):
        await call


async def test_what_adapters_write_of_waits_is_waited_for(database: Database, opened: Opened) -> None:
    async def settled() -> None:
        async with database.begin() as connection:
            await sessions.wait_for_writers(connection, opened.session_id)

    async with database.begin() as holder:
        by_hand = update(SessionTable).where(SessionTable.id == opened.session_id)
        await holder.execute(by_hand.values(temperature=0.5))
        waiting = asyncio.create_task(settled())
        await wait_for_a_lock(database)
        assert not waiting.done()
    await waiting
