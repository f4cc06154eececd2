"""Limits of the calls that wait for the store and of the bodies that are read meanwhile; a client that leaves makes
room."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.store_outage import HeldCalls, TooManyHeldError
from store import sessions
from store.database import Database
from tests.integration.adapter.conftest import (
    Opened,
    ScriptedEngine,
    adapter_here,
    adapter_settings,
    cut_off,
    open_rollout,
)
from tests.integration.adapter.test_durability import ASK, ask, let_adapters_run

CHAT = {"messages": ASK, "stream": True}
CLAUDE = {"messages": ASK, "model": "policy", "max_tokens": 5}
NUM_BYTES = 24 << 20
"""More than the buffers of a socket and of the server hold."""


@contextlib.asynccontextmanager
async def held(address: str, token: str, body: Any = CHAT) -> AsyncIterator[int]:
    """Make a call that asks for a stream. Yields its status, once it waits for the store if it is 200."""
    async with (
        httpx.AsyncClient(base_url=address, headers={"x-api-key": token}, timeout=300) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        lines = reply.aiter_lines()  # kept: the connection ends with it
        if reply.status_code == 200:
            assert (await anext(lines)).startswith(": ")
        yield reply.status_code


async def test_more_calls_than_may_wait_are_refused_in_the_vendors_form(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened, database: Database
) -> None:
    other = await open_rollout(database, 1)
    await engine.say("one", "two")
    limits: Any = {"max_held_calls": 3, "max_held_calls_per_session": 2, "max_held_bytes": 1000}
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir, **limits)) as address,
        contextlib.AsyncExitStack() as calls,
        httpx.AsyncClient(base_url=address, timeout=60) as http,
    ):
        for one in (opened, other):
            assert (await ask(address, one.token)).status_code == 200
        line.cut()
        long: Any = {"messages": [{"role": "user", "content": "x" * 1000}], "stream": True}
        assert await calls.enter_async_context(held(address, other.token, long)) == 503
        for _ in range(2):
            assert await calls.enter_async_context(held(address, opened.token)) == 200
        assert await calls.enter_async_context(held(address, opened.token)) == 503
        reply = await http.post("/v1/messages", json=CLAUDE, headers={"x-api-key": opened.token})
        assert reply.status_code == 529 and reply.json()["error"]["type"] == "overloaded_error"
        assert reply.headers["retry-after"] == "1"
        assert await calls.enter_async_context(held(address, other.token)) == 200
        assert (await http.get("/v1/models", headers={"x-api-key": "unknown"})).status_code == 503


async def test_refused_calls_whose_note_waits_for_the_store_are_counted(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    """Their bodies would take memory without a limit; a session that is known to have been refused is told at once."""
    limits: Any = {"max_held_calls_per_session": 2, "max_body_bytes": 1000}
    refused: Any = {"messages": ASK, "n": 2, "stream": True}
    large: Any = {"messages": ASK, "padding": "x" * 2000}
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir, **limits)) as address,
        httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http,
        asyncio.timeout(300),
    ):
        assert (await http.get("/v1/models")).status_code == 200  # the session is known now
        line.cut()
        async with held(address, opened.token, refused) as status:
            assert status == 200  # it gets comments while it waits
            leaving = asyncio.create_task(http.post("/v1/chat/completions", json=large))
            while await _has_room(address, opened.token):
                pass
            assert not leaving.done()
            leaving.cancel()
            while not await _has_room(address, opened.token):
                pass
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=large))
        await let_adapters_run(address)
        line.mend()
        assert (await waiting).status_code == 413
        async with opened.database.begin() as connection:
            key = (opened.rollout_id, 1)
            assert (await sessions.read_progress(connection, [key]))[key].refusal
        line.cut()
        assert (await http.post("/v1/chat/completions", json=refused)).status_code == 400
        assert (await http.post("/v1/chat/completions", json=large)).status_code == 413


async def test_a_client_that_leaves_makes_room(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    settings: Any = {"max_held_calls": 1}
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir, **settings)) as address,
        httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http,
        asyncio.timeout(300),
    ):
        assert (await http.get("/v1/models")).status_code == 200  # the session is known now
        line.cut()
        unknown = {"x-api-key": "unknown"}
        for leaves in (
            lambda: http.post("/v1/messages/count_tokens", json=CLAUDE),
            lambda: http.get("/v1/models", headers=unknown),
        ):
            leaving = asyncio.create_task(leaves())
            await let_adapters_run(address)
            assert not leaving.done() and not await _has_room(address, opened.token)
            leaving.cancel()
            while not await _has_room(address, opened.token):
                pass
            await let_adapters_run(address)  # the place of the last call is free again


async def _has_room(address: str, token: str) -> bool:
    async with held(address, token) as status:
        return status == 200


async def test_a_body_without_a_known_token_is_not_read_while_the_store_is_away(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    async with cut_off(postgres_url) as (url, line), adapter_here(adapter_settings(url, model_dir)) as address:
        async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=60) as http:
            assert (await http.get("/v1/models")).status_code == 200
        line.cut()
        where = httpx.URL(address)
        reader, writer = await asyncio.open_connection(where.host, where.port)
        head = f"POST /v1/messages HTTP/1.1\r\nhost: a\r\nx-api-key: unknown\r\ncontent-length: {NUM_BYTES}\r\n\r\n"
        writer.write(head.encode() + b" " * NUM_BYTES)
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            for _ in range(300):  # the server would have read all of it meanwhile
                await http.get("/health")
        assert writer.transport.get_write_buffer_size() > 0
        line.mend()
        assert b" 401 " in await reader.readline()
        writer.close()


def test_invented_tokens_take_half_of_the_places_and_each_has_its_own_limit() -> None:
    """So neither one session's calls nor tokens that a box invents keep the calls of known sessions out."""
    calls = HeldCalls(max_per_session=2, max_calls=6, max_bytes=100)
    with contextlib.ExitStack() as stack:
        for token in (b"a", b"a"):
            stack.enter_context(calls.add(token, 0))
        with pytest.raises(TooManyHeldError):
            stack.enter_context(calls.add(b"a", 0))
        stack.enter_context(calls.add(b"b", 0))
        with pytest.raises(TooManyHeldError):
            stack.enter_context(calls.add(b"c", 0))
        for session_id in (1, 2, 3):
            stack.enter_context(calls.add(session_id, 10))
        with pytest.raises(TooManyHeldError):
            stack.enter_context(calls.add(4, 0))
    for token in (b"c", b"d", b"e"):
        stack.enter_context(calls.add(token, 0))
