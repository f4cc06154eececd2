"""A retry with other options gets an answer for these: of the stored tokens if they allow it, else a new sample.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.arrays import unpack_json
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, THOUGHT

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "tools": CHAT_TOOLS}
RETRY = {"x-stainless-retry-count": "1"}
RAW = "Hm.\n" + CALL + "\n" + CALL


def client(address: str, opened: Opened) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300)


async def retried(
    address: str, engine: ScriptedEngine, opened: Opened, first: dict[str, Any], second: dict[str, Any], joins: bool
) -> dict[str, Any]:
    """Return the choice that the second request gets, after the first one's end or while it is sampled."""
    async with client(address, opened) as http:
        if not joins:
            assert (await http.post(PATH, json=BODY | first)).status_code == 200
            await opened.wait_delivered(1)
            return dict((await http.post(PATH, json=BODY | second, headers=RETRY)).json()["choices"][0])
        begun = asyncio.create_task(http.post(PATH, json=BODY | first))
        await engine.wait_for_calls(1)
        begun.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await begun
        again = asyncio.create_task(http.post(PATH, json=BODY | second, headers=RETRY))
        await asyncio.sleep(0.3)  # it joins, or begins a call of its own
        await engine.release("first")
        return dict((await again).json()["choices"][0])


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"max_tokens": 5}, {"max_tokens": 50}),
        ({"max_tokens": 50}, {"max_tokens": 3}),
        ({"stop": "four"}, {}),
        ({}, {"stop": "three"}),
        ({}, {"logprobs": True}),
    ],
)
async def test_options_that_act_on_sampling_get_a_new_sample(
    thinking: str, engine: ScriptedEngine, opened: Opened, first: dict[str, Any], second: dict[str, Any], joins: bool
) -> None:
    ids = engine.ids("</think>One two three.")
    output = {"ids": ids[:5], "finish": "length"} if first.get("max_tokens") == 5 else {"ids": ids}
    await engine.script(output | ({"hold": "first"} if joins else {}), {"ids": engine.ids("</think>Second.")})
    choice = await retried(thinking, engine, opened, first, second, joins)
    assert choice["message"]["content"] == "Second." and bool(choice["logprobs"]) is bool(second.get("logprobs"))
    assert len((await engine.seen())["calls"]) == 2


@pytest.mark.parametrize("joins", [False, True])
async def test_options_that_act_on_the_view_are_applied_to_the_stored_tokens(
    thinking: str, engine: ScriptedEngine, database: Database, opened: Opened, joins: bool
) -> None:
    """Also if the session is continued with the new view: it is recognised."""
    await engine.script(
        {"ids": engine.ids("</think>" + RAW)} | ({"hold": "first"} if joins else {}),
        {"ids": engine.ids("</think>Done.")},
    )
    choice = await retried(thinking, engine, opened, {}, {"tool_choice": "none"}, joins)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", RAW)
    later = [*BODY["messages"], choice["message"], {"role": "user", "content": "on"}]
    async with client(thinking, opened) as http:
        assert (await http.post(PATH, json=BODY | {"messages": later})).status_code == 200
        one = await http.post(PATH, json=BODY | {"parallel_tool_calls": False}, headers=RETRY)
        two = await http.post(PATH, json=BODY, headers=RETRY)
        formed = await http.post(PATH, json=BODY | {"response_format": {"type": "json_object"}}, headers=RETRY)
        none = await http.post(
            PATH, json=BODY | {"response_format": {"type": "json_object"}, "tool_choice": "none"}, headers=RETRY
        )
    (call,) = one.json()["choices"][0]["message"]["tool_calls"]
    calls = two.json()["choices"][0]["message"]["tool_calls"]
    assert calls[0] == call and len(calls) == 2
    assert formed.json()["choices"][0]["message"]["refusal"] is None
    assert "not the JSON" in none.json()["choices"][0]["message"]["refusal"]
    turns = await opened.wait_delivered(2)
    assert [turn.fork_cause for turn in turns] == ["root", None] and len((await engine.seen())["calls"]) == 2


async def test_another_process_recognises_the_views(
    postgres_url: str, model_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    settings = adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder", reasoning_parser="qwen3")
    await engine.say("</think>" + RAW, "</think>Done.")
    async with adapter_here(settings) as address, client(address, opened) as http:
        assert (await http.post(PATH, json=BODY)).status_code == 200
        await opened.wait_delivered(1)
        for _ in range(2):
            view = await http.post(PATH, json=BODY | {"tool_choice": "none"}, headers=RETRY)
    later = [*BODY["messages"], view.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    async with adapter_here(settings) as address, client(address, opened) as http:
        assert (await http.post(PATH, json=BODY | {"messages": later})).status_code == 200
        stored = await http.post(PATH, json=BODY, headers=RETRY)
    assert len(stored.json()["choices"][0]["message"]["tool_calls"]) == 2
    turns = await opened.wait_delivered(2)
    assert [turn.fork_cause for turn in turns] == ["root", None] and len((await engine.seen())["calls"]) == 2
    answer = unpack_json(turns[0].answer)
    assert isinstance(answer, dict) and len(answer["message"]["views"]) == 1


@pytest.mark.parametrize("joins", [False, True])
async def test_a_stream_may_become_a_reply(thinking: str, engine: ScriptedEngine, opened: Opened, joins: bool) -> None:
    await engine.script({"ids": engine.ids("</think>One.")} | ({"hold": "first"} if joins else {}))
    choice = await retried(thinking, engine, opened, {"stream": True}, {}, joins)
    assert choice["message"]["content"] == "One." and len((await engine.seen())["calls"]) == 1


async def test_a_repeated_idempotency_key_is_the_same_call(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("one", "two", "three")
    texts = []
    async with client(adapter, opened) as http:
        for key in ("a", "a", "b", "b"):
            reply = await http.post(PATH, json=BODY, headers={"idempotency-key": key})
            texts.append(reply.json()["choices"][0]["message"]["content"])
            await opened.wait_delivered(len(set(texts)))
    assert texts == ["one", "one", "two", "two"] and len(await opened.turns()) == 2


async def test_another_idempotency_key_is_another_call(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """Also if its predecessor's answer was lost, and if an SDK repeats a first attempt that did not arrive."""
    await engine.script({"ids": engine.ids("one"), "hold": "first"}, {"ids": engine.ids("two")})
    async with client(adapter, opened) as http:
        begun = asyncio.create_task(http.post(PATH, json=BODY, headers={"idempotency-key": "a"}))
        await engine.wait_for_calls(1)
        begun.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await begun
        other = await http.post(PATH, json=BODY, headers={"idempotency-key": "b"} | RETRY)
        await engine.release("first")
        again = await http.post(PATH, json=BODY, headers={"idempotency-key": "a"})
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in (other, again)]
    assert texts == ["two", "one"] and len(await opened.turns()) == 2


async def test_another_process_knows_the_options(
    postgres_url: str, model_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    settings = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    await engine.say(THOUGHT + RAW, "</think>Second.")
    async with (
        adapter_here(adapter_settings(postgres_url, model_dir, **settings)) as one,
        adapter_here(adapter_settings(postgres_url, model_dir, **settings)) as other,
    ):
        async with client(one, opened) as http:
            assert (await http.post(PATH, json=BODY)).status_code == 200
        await opened.wait_delivered(1)
        async with client(other, opened) as http:
            view = await http.post(PATH, json=BODY | {"tool_choice": "none"}, headers=RETRY)
            new = await http.post(PATH, json=BODY | {"stop": "x"}, headers=RETRY)
    assert view.json()["choices"][0]["message"]["content"] == RAW
    assert new.json()["choices"][0]["message"]["content"] == "Second."
