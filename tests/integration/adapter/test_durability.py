"""Kills, retries, seals, pauses: one row per call in each case.

Each clause of what is a retry and what is a new call (docs/adapter.md) is tested once.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from sqlalchemy import text, update

from adapter.prompt.renderer import Renderer
from adapter.turns.loss_mask import build_chains
from engine.client import EngineClient
from store import engines, sessions, turns
from store.database import Database
from store.schema import TurnTable
from tests.integration.adapter.conftest import (
    Opened,
    ScriptedEngine,
    adapter_here,
    adapter_process,
    adapter_settings,
    cut_off,
    engine_process,
    open_rollout,
    register,
)
from tests.integration.adapter.test_dialects import anthropic_client, chat_client

_WAITING_FOR_LOCK = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
ASK: Any = [{"role": "user", "content": "x"}]
INSERTED = b"\0\0\0\6opened"
"""A value in the answer of the statement that has inserted a turn."""


async def ask(address: str, token: str, headers: dict[str, str] | None = None, messages: Any = ASK) -> Any:
    async with httpx.AsyncClient(
        base_url=address, headers={"authorization": f"Bearer {token}"} | (headers or {}), timeout=300
    ) as http:
        return await http.post("/v1/chat/completions", json={"messages": messages})


async def let_adapters_run(address: str) -> None:
    """Let an adapter of this process notice the end of a connection, which it reads before these requests."""
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(20):
            await http.get(address + "/health")


async def wait_for_a_lock(database: Database) -> None:
    """Wait until a transaction waits for a lock."""
    while True:
        async with database.begin() as conn:  # a new one each time: a transaction sees one state of these statistics
            if (await conn.execute(_WAITING_FOR_LOCK)).scalar_one():
                return
        await asyncio.sleep(0.02)


async def test_an_adapter_killed_in_mid_call_answers_the_retry_with_one_turn(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    settings = adapter_settings(postgres_url, model_dir)
    await engine.script({"ids": engine.ids("lost"), "hold": "gate"}, {"ids": engine.ids("kept")})
    async with adapter_process(settings) as process:
        lost = asyncio.create_task(ask(f"http://127.0.0.1:{settings.port}", opened.token))
        await engine.wait_for_calls(1)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await lost
    async with adapter_here(settings) as address:
        # Without the SDK's retry header: the killed process is recognised by its lease.
        reply = await ask(address, opened.token)
    assert reply.json()["choices"][0]["message"]["content"] == "kept"
    rows = await opened.wait_delivered(1)
    assert [(row.state, row.ordinal) for row in rows] == [("completed", 0)]
    calls = (await engine.seen())["calls"]
    assert len(calls) == 2 and calls[0]["ids"] == calls[1]["ids"]


async def test_writes_in_one_transaction_have_the_same_result_as_alone(database: Database, opened: Opened) -> None:
    """Several sessions, the same call twice, a closed session, answers of several policy versions."""
    other, closed = await open_rollout(database, 1), await open_rollout(database, 2)
    spans = [
        [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
        [{"version": "a", "start": 0, "end": 2}],
    ]

    def new(one: Opened) -> turns.NewTurn:
        places = {
            "parent_turn_id": None,
            "kept_tokens": 0,
            "fork_cause": None,
            "dialect": "chat",
            "prompt_tokens": 1,
            "suffix_ids": b"1234",
        }
        values: dict[str, Any] = {
            "session_id": one.session_id,
            "rollout_id": one.rollout_id,
            "attempt": 1,
            "lane": "",
            "digest": b"d",
        }
        values |= {
            "ordinal": 0,
            "kind": "main",
            "temperature": 1.0,
            "request": b"r",
            "engine_id": None,
            "lease_owner": "me",
        }
        return turns.NewTurn(**values | places)

    def done(turn_id: int, one: Opened, at: int) -> turns.CompletedTurn:
        values: dict[str, Any] = {
            "sampled_ids": b"12345678",
            "logprobs": b"l",
            "num_sampled": 2,
            "logprobs_valid": True,
            "answer": b"a",
        }
        values |= {
            "version_spans": spans[at],
            "finish_reason": "stop",
            "engine_id": None,
            "engine_wait_seconds": 0.5 * at,
        }
        return turns.CompletedTurn(id=turn_id, session_id=one.session_id, **values)

    async with database.begin() as conn:
        await sessions.close_session(conn, closed.rollout_id, 1)
    batch = [new(one) for one in (opened, opened, closed, other)]
    first, twice, late, second = (await turns.write_turns(database, batch, [], [])).opened
    assert first is not None and second is not None and (twice, late) == (None, None)
    of_another_session = [done(second, opened, 1)]
    assert (await turns.write_turns(database, [], of_another_session, [])).completed == [False]
    answers = [done(first, opened, 0), done(second, other, 1)]
    assert (await turns.write_turns(database, [], answers, [])).completed == [True, True]
    repeated = await turns.write_turns(database, [new(other)], answers[:1], [first])
    assert (repeated.opened, repeated.completed) == ([None], [False])
    rows = [(await one.turns())[0] for one in (opened, other)]
    assert [row.version_spans for row in rows] == spans and [row.engine_wait_seconds for row in rows] == [0.0, 0.5]
    assert [(row.state, row.delivered) for row in rows] == [("completed", True), ("completed", False)]


async def test_identical_calls_at_the_same_time_are_two_samples(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.script({"ids": engine.ids("one"), "hold": "gate"}, {"ids": engine.ids("two"), "hold": "gate"})
    calls = [asyncio.create_task(ask(adapter, opened.token)) for _ in range(2)]
    await engine.wait_for_calls(2)
    await engine.release("gate")
    texts = {(await call).json()["choices"][0]["message"]["content"] for call in calls}
    assert texts == {"one", "two"}
    rows = await opened.wait_delivered(2)
    assert [row.ordinal for row in rows] == [0, 1]
    assert rows[1].fork_cause in ("root", "restart")


async def test_identical_calls_through_two_processes_are_two_samples(
    adapter: str, postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.script({"ids": engine.ids("one"), "hold": "gate"}, {"ids": engine.ids("two")})
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as second:
        first_call = asyncio.create_task(ask(adapter, opened.token))
        await engine.wait_for_calls(1)
        assert (await ask(second, opened.token)).json()["choices"][0]["message"]["content"] == "two"
        await engine.release("gate")
        assert (await first_call).json()["choices"][0]["message"]["content"] == "one"
    assert [row.ordinal for row in await opened.wait_delivered(2)] == [0, 1]


async def test_a_delivered_answer_is_sampled_anew_unless_the_sdk_says_retry(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("one", "two")
    texts = []
    for headers in ({}, {}, {"x-stainless-retry-count": "1"}):
        reply = await ask(adapter, opened.token, headers)
        texts.append(reply.json()["choices"][0]["message"]["content"])
        await opened.wait_delivered(min(len(texts), 2))
    assert texts == ["one", "two", "two"]
    assert len(await opened.turns()) == 2


async def test_a_lost_clients_retry_joins_or_gets_the_stored_answer(
    adapter: str, postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.script({"ids": engine.ids("one"), "hold": "gate"})
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as second:
        first = asyncio.create_task(ask(adapter, opened.token))
        await engine.wait_for_calls(1)
        first.cancel()
        async with asyncio.timeout(300):  # the disconnect reaches the store
            while (await opened.turns())[0].lease_owner is not None:
                await asyncio.sleep(0.02)
        joined = asyncio.create_task(ask(second, opened.token))
        await asyncio.sleep(0.5)  # gives a wrong implementation the time to ask the engine again
        await engine.release("gate")
        assert (await joined).json()["choices"][0]["message"]["content"] == "one"
    assert len((await engine.seen())["calls"]) == 1
    assert len(await opened.wait_delivered(1)) == 1


async def test_a_client_that_disconnects_while_its_request_is_resolved_leaves_nothing_behind(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Its retry waited for a killed process's lease.

    The next one gets the row's answer, and is not taken for a second call.
    """
    settings = adapter_settings(postgres_url, model_dir, lease_seconds=6.0)
    await engine.script(
        {"ids": engine.ids("lost"), "hold": "gate"}, {"ids": engine.ids("kept")}, {"ids": engine.ids("twice")}
    )
    async with adapter_process(settings) as process:
        lost = asyncio.create_task(ask(f"http://127.0.0.1:{settings.port}", opened.token))
        await engine.wait_for_calls(1)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await lost
    async with adapter_here(settings) as address:
        gone = asyncio.create_task(ask(address, opened.token))
        await asyncio.sleep(0.5)  # time to reach the wait for the lease
        gone.cancel()
        reply = await ask(address, opened.token)
    assert reply.json()["choices"][0]["message"]["content"] == "kept"
    assert [(row.state, row.ordinal) for row in await opened.wait_delivered(1)] == [("completed", 0)]
    assert len((await engine.seen())["calls"]) == 2


async def test_an_unavailable_store_loses_nothing(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """New calls and those that an engine has answered wait for the store, however long, and are delivered once."""
    await engine.script({"ids": engine.ids("computed"), "hold": "gate"}, {"ids": engine.ids("later")})
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        waiting = asyncio.create_task(ask(address, opened.token))
        await engine.wait_for_calls(1)
        line.cut()
        held = asyncio.create_task(ask(address, opened.token, messages=[{"role": "user", "content": "y"}]))
        await engine.release("gate")
        await asyncio.sleep(0.5)  # gives a wrong implementation the time to answer what is not stored
        assert not waiting.done() and not held.done()
        assert [row.state for row in await opened.turns()] == ["in_flight"]
        line.mend()
        assert (await waiting).json()["choices"][0]["message"]["content"] == "computed"
        assert (await held).json()["choices"][0]["message"]["content"] == "later"
        rows = await opened.wait_delivered(2)
    assert [(row.state, row.ordinal) for row in rows] == [("completed", 0)] * 2
    assert len((await engine.seen())["calls"]) == 2


async def test_the_vendors_clients_wait_under_pings_while_the_store_is_away(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, database: Database
) -> None:
    """A session whose token is known, and no retry of the SDKs."""
    opened = await open_rollout(database)
    await engine.say("one", "two", "three")
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=60) as http:
            assert (await http.get("/v1/models")).status_code == 200
        line.cut()
        async with (
            chat_client(address, opened.token) as chat,
            anthropic_client(address, opened.token) as claude,
            httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http,
        ):

            async def of_messages() -> str:
                asked: Any = [{"role": "user", "content": "a"}]
                async with claude.messages.stream(model="policy", messages=asked, max_tokens=50) as stream:
                    return await stream.get_final_text()

            async def of_responses() -> str:
                async with chat.responses.stream(model="policy", input="b") as stream:
                    return (await stream.get_final_response()).output_text

            answers = [asyncio.create_task(of_messages()), asyncio.create_task(of_responses())]
            async with http.stream("POST", "/v1/messages", json={"messages": ASK, "stream": True}) as reply:
                lines = reply.aiter_lines()
                async for line_of_stream in lines:  # it is pinged before its call has begun
                    if line_of_stream.startswith(": "):
                        break
                line.mend()
                events = [orjson.loads(one[6:]) async for one in lines if one.startswith("data: ")]
            texts = [await one for one in answers]
        texts.append("".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta"))
        assert sorted(texts) == ["one", "three", "two"]
        await opened.wait_delivered(3)
    assert len((await engine.seen())["calls"]) == 3


async def test_a_held_call_of_an_unknown_session_ends_with_the_vendors_error(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, database: Database
) -> None:
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        line.cut()
        async with chat_client(address, "wrong") as chat, anthropic_client(address, "wrong") as claude:
            plain = asyncio.create_task(chat.chat.completions.create(model="policy", messages=ASK))
            streamed = asyncio.create_task(
                claude.messages.create(model="policy", messages=ASK, max_tokens=5, stream=True)
            )
            await let_adapters_run(address)
            assert not plain.done() and not streamed.done()
            line.mend()
            with pytest.raises(openai.AuthenticationError, match="unknown"):
                await plain
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await streamed


async def test_a_held_call_whose_client_leaves_while_its_row_is_inserted_is_generated(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Otherwise the row would look alive as long as its process, and a retry at another one would wait for it."""
    await engine.say("one")
    settings = adapter_settings(postgres_url, model_dir)
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir)) as address,
        adapter_here(settings) as second,
    ):
        async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=60) as http:
            assert (await http.get("/v1/models")).status_code == 200  # only a known session gets comments
        line.cut()
        async with asyncio.timeout(300), opened.database.begin() as conn:
            await conn.execute(text("SELECT FROM session WHERE id = :id FOR UPDATE"), {"id": opened.session_id})
            async with (
                httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http,
                http.stream("POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}) as held,
            ):
                comments = held.aiter_lines()  # kept: the connection ends with it
                async for comment in comments:
                    if comment.startswith(": "):
                        break
                line.mend()
                await wait_for_a_lock(opened.database)
            await let_adapters_run(address)
        reply = await ask(second, opened.token, {"x-stainless-retry-count": "1"})
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        assert [(row.state, row.ordinal) for row in await opened.wait_delivered(1)] == [("completed", 0)]
    assert len((await engine.seen())["calls"]) == 1


async def test_a_row_whose_insertion_was_not_confirmed_does_not_hold_retries(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Its client gave up during the outage, so its process never learns of it by a request."""
    await engine.say("one")
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir)) as address,
        adapter_here(adapter_settings(postgres_url, model_dir)) as second,
    ):
        line.loses_answer_with = INSERTED
        lost = asyncio.create_task(ask(address, opened.token))
        async with asyncio.timeout(300):
            while line.is_whole or not await opened.turns():
                await asyncio.sleep(0.02)
        lost.cancel()
        await let_adapters_run(address)
        line.mend()
        reply = await ask(second, opened.token, {"x-stainless-retry-count": "1"})
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        rows = await opened.wait_delivered(1)
    assert [(row.state, row.ordinal) for row in rows] == [("aborted", 0), ("completed", 1)]
    assert len((await engine.seen())["calls"]) == 1


async def test_a_call_whose_insertion_was_not_confirmed_is_answered(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("one")
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        line.loses_answer_with = INSERTED
        held = asyncio.create_task(ask(address, opened.token))
        async with asyncio.timeout(300):
            while line.is_whole or not await opened.turns():
                await asyncio.sleep(0.02)
        line.mend()
        assert (await held).json()["choices"][0]["message"]["content"] == "one"
        rows = await opened.wait_delivered(1)
    assert [(row.state, row.ordinal) for row in rows] == [("aborted", 0), ("completed", 1)]


async def test_two_processes_serve_one_conversation(
    adapter: str, postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened, renderer: Renderer
) -> None:
    await engine.say("one", "two", "three")
    messages: list[Any] = list(ASK)
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as second:
        for address in (adapter, second, adapter):
            reply = (await ask(address, opened.token, messages=messages)).json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "next"}]
    rows = await opened.wait_delivered(3)
    assert [row.fork_cause for row in rows] == ["root", None, None]
    async with opened.database.begin() as conn:
        chains = build_chains(await turns.load_metas(conn, opened.rollout_id, 1))
    assert len(chains) == 1 and chains[0].num_trained == sum(row.num_sampled for row in rows)


async def test_a_seal_ends_calls_in_flight(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.script({"ids": engine.ids("late"), "hold": "gate"})
    call = asyncio.create_task(ask(adapter, opened.token))
    await engine.wait_for_calls(1)
    async with opened.database.begin() as conn:
        to_abort = await sessions.close_session(conn, opened.rollout_id, 1)
    assert [address for address, _ in to_abort] == [engine.address]
    async with EngineClient(engine.address) as client:
        await client.abort([request for _, request in to_abort])
    await engine.release("gate")
    assert (await call).status_code == 401
    assert [row.state for row in await opened.turns()] == ["aborted"]
    assert (await engine.seen())["aborted"] == [f"generate-tokens-{(await engine.seen())['calls'][0]['request_id']}"]
    assert (await ask(adapter, opened.token, messages=[{"role": "user", "content": "more"}])).status_code == 401
    assert len(await opened.turns()) == 1
    async with opened.database.begin() as conn:
        assert await sessions.close_session(conn, opened.rollout_id, 1) == []


async def test_a_paused_engine_is_waited_for_and_the_wait_is_recorded(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("after")
    async with opened.database.begin() as conn:
        assert await engines.begin_engine_pause(conn, engine.id, 60)
    call = asyncio.create_task(ask(adapter, opened.token))
    async with asyncio.timeout(300):
        while True:
            async with opened.database.begin() as conn:
                progress = (await sessions.read_progress(conn, [(opened.rollout_id, 1)]))[opened.rollout_id, 1]
            if progress.engine_wait_seconds > 0.9:
                break
            await asyncio.sleep(0.05)
    assert not call.done() and progress.num_turns == 0
    async with opened.database.begin() as conn:
        assert await engines.end_engine_pause(conn, engine.id, "v1")
    assert (await call).json()["choices"][0]["message"]["content"] == "after"
    (row,) = await opened.wait_delivered(1)
    assert row.engine_wait_seconds > 0.4


async def test_an_engine_that_dies_is_replaced(
    adapter: str, opened: Opened, database: Database, renderer: Renderer
) -> None:
    async with engine_process() as (address, process), engine_process() as other_process:
        mortal = await register(database, renderer, address, process)
        await mortal.script({"die": True})
        call = asyncio.create_task(ask(adapter, opened.token))
        await asyncio.to_thread(process.wait)
        other = await register(database, renderer, *other_process, "alive")
        async with database.begin() as conn:
            await engines.set_engine_gone(conn, mortal.id)
        assert (await call).json()["choices"][0]["message"]["content"] == "alive"
        (row,) = await opened.wait_delivered(1)
        assert row.engine_id == other.id


async def test_a_refusal_of_the_engine_is_a_400_for_the_client(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.script({"status": 400})
    async with chat_client(adapter, opened.token) as client:
        with pytest.raises(openai.BadRequestError, match="refused"):
            await client.chat.completions.create(model="policy", messages=ASK)
    assert [row.state for row in await opened.turns()] == ["aborted"]


async def test_sub_agents_have_their_own_lane(adapter: str, engine: ScriptedEngine, database: Database) -> None:
    opened = await open_rollout(database, max_turns=3)
    await engine.say("main", "sub", "sub", "x")
    for headers in ({}, {"x-claude-code-agent-id": "a1"}, {"x-claude-code-agent-id": "a2"}):
        assert (await ask(adapter, opened.token, headers)).status_code == 200
    rows = await opened.wait_delivered(3)
    assert [(row.lane, row.kind, row.fork_cause) for row in rows] == [
        ("", "main", "root"),
        ("a1", "sub_agent", "sub_agent"),
        ("a2", "sub_agent", "sub_agent"),
    ]
    assert (await ask(adapter, opened.token, messages=[{"role": "user", "content": "4th"}])).status_code == 403


@pytest.mark.parametrize(("answer", "is_used"), [("I found the loop in reader.py.", True), ("Done.", False)])
async def test_a_sub_agents_last_turn_is_proven_by_the_request_that_quotes_it(
    adapter: str, engine: ScriptedEngine, database: Database, answer: str, is_used: bool
) -> None:
    """Its adapter was killed before it recorded the delivery. A short text may be in a request by chance."""
    opened = await open_rollout(database)
    await engine.say("Look.", answer, "Good.")
    assert (await ask(adapter, opened.token)).status_code == 200
    assert (await ask(adapter, opened.token, {"x-claude-code-agent-id": "a1"})).status_code == 200
    await opened.wait_delivered(2)
    async with database.begin() as conn:
        await conn.execute(update(TurnTable).where(TurnTable.lane == "a1").values(delivered=False))
        assert [one.came_back for one in await turns.load_metas(conn, opened.rollout_id, 1)] == [False, False]
    asked = [{"role": "user", "content": f"Your agent says: {answer}\nGo on."}]
    assert (await ask(adapter, opened.token, messages=asked)).status_code == 200
    async with database.begin() as conn:
        metas = await turns.load_metas(conn, opened.rollout_id, 1)
    assert [one.came_back for one in metas] == [False, is_used, False]


async def test_the_last_allowed_turn_can_be_requested_again(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    """The connection broke. The retry does not count as a turn; a new sample does, and so does any other call."""
    opened = await open_rollout(database, max_turns=1)
    await engine.script({"ids": engine.ids("one"), "hold": "gate"}, {"ids": engine.ids("two")})
    lost = asyncio.create_task(ask(adapter, opened.token))
    await engine.wait_for_calls(1)
    lost.cancel()
    async with asyncio.timeout(300):
        while (await opened.turns())[0].lease_owner is not None:
            await asyncio.sleep(0.02)
        await engine.release("gate")
        while (await opened.turns())[0].state != "completed":
            await asyncio.sleep(0.02)
    assert (await ask(adapter, opened.token)).json()["choices"][0]["message"]["content"] == "one"
    await opened.wait_delivered(1)
    assert (await ask(adapter, opened.token, {"x-stainless-retry-count": "1"})).json()["choices"][0]["message"][
        "content"
    ] == "one"
    for messages in (ASK, [{"role": "user", "content": "y"}]):
        refused = await ask(adapter, opened.token, messages=messages)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "turn_limit_reached")
    assert len(await opened.turns()) == len((await engine.seen())["calls"]) == 1


async def test_many_conversations_at_once_lose_and_repeat_nothing(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    """Completing, renewing leases and recording waits lock the same rows, without a deadlock: one row per call, one
    chain each.
    """
    await engine.say(*["fine"] * 60)
    async with database.begin() as conn:
        assert await engines.begin_engine_pause(conn, engine.id, 60)
    members = [await open_rollout(database, member) for member in range(20)]

    async def talk(opened: Opened) -> None:
        messages: list[Any] = list(ASK)
        for _ in range(3):
            reply = await ask(adapter, opened.token, messages=messages)
            assert reply.status_code == 200, reply.text
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "on"}]

    talks = asyncio.gather(*(talk(opened) for opened in members))
    await asyncio.sleep(1.2)  # more than one round of the lease loop
    async with database.begin() as conn:
        assert await engines.end_engine_pause(conn, engine.id, None)
    await talks
    assert len((await engine.seen())["calls"]) == 60
    for opened in members:
        rows = await opened.wait_delivered(3)
        assert [(row.state, row.fork_cause) for row in rows] == [
            ("completed", "root"),
            ("completed", None),
            ("completed", None),
        ]
