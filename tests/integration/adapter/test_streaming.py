"""Answers that clients read while they are sampled: what is seen when, and what is stored if a part dies meanwhile.

The states are those of the table in `adapter/turns/capture.py`. vLLM's parsers are imported once for this file (about
13 CPU seconds).
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from adapter.prompt.renderer import Renderer
from adapter.turns.loss_mask import build_chains
from store import engines, turns
from store.arrays import ids_from_bytes
from store.database import Database
from tests.integration.adapter.conftest import (
    Opened,
    ScriptedEngine,
    adapter_here,
    adapter_process,
    adapter_settings,
    cut_off,
    engine_process,
    register,
)
from tests.integration.adapter.test_dialects import (
    ANTHROPIC_TOOLS,
    CALL,
    CHAT_TOOLS,
    SCHEMA,
    THOUGHT,
    anthropic_client,
    chat_client,
)
from tests.integration.adapter.test_durability import ASK, ask

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
OUTPUT = THOUGHT + "Looking around.\n" + CALL


@pytest.fixture
async def live(thinking: str, engine: ScriptedEngine, opened: Opened) -> str:
    """An adapter that has its parsers."""
    await engine.say("ready")
    await ask(thinking, opened.token, messages=[{"role": "user", "content": "warm up"}])
    return thinking


@pytest.fixture
async def with_tools(postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened) -> AsyncIterator[str]:
    """An adapter that parses tool calls, and has imported its parser."""
    async with adapter_here(adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder")) as address:
        await engine.say("ready")
        body = {"messages": [{"role": "user", "content": "warm up"}], "tools": CHAT_TOOLS}
        async with httpx.AsyncClient(headers={"x-api-key": opened.token}, timeout=300) as http:
            await http.post(address + "/v1/chat/completions", json=body)
        yield address


async def script(engine: ScriptedEngine, output: str = OUTPUT, until: str = "Looking around", **more: Any) -> None:
    """Let the engine wait after the token that completes `until`."""
    ids = engine.ids(output)
    decode = engine.renderer.tokenizer.decode
    at = next(number for number in range(len(ids)) if until in decode(ids[:number]))
    await engine.script({"ids": ids, "hold": "gate", "at": at} | more)


async def test_messages_are_seen_while_they_are_sampled(live: str, engine: ScriptedEngine, opened: Opened) -> None:
    await script(engine)
    seen: list[str] = []
    is_released = False
    async with anthropic_client(live, opened.token) as client:
        asked = client.messages.stream(model="policy", messages=ASK, tools=ANTHROPIC_TOOLS, max_tokens=90)
        async with asyncio.timeout(300), asked as stream:
            async for event in stream:
                if event.type in ("thinking", "text"):
                    seen.append(event.type)
                    if "Looking around" in event.snapshot and not is_released:
                        is_released = True
                        assert [row.state for row in await opened.turns()][1:] == ["in_flight"]
                        await engine.release("gate")
            message = await stream.get_final_message()
    thought, text, call = message.content
    assert (thought.thinking, text.text) == ("first look", "Looking around.")  # type: ignore[union-attr]
    assert call.input == {"command": "ls -a", "n": 3}  # type: ignore[union-attr]
    assert seen == sorted(seen, reverse=True) and {"thinking", "text"} == set(seen)
    row = (await opened.wait_delivered(2))[-1]
    assert is_released and ids_from_bytes(row.sampled_ids).tolist() == engine.ids(OUTPUT) and row.logprobs_valid


SECOND = CALL.replace("ls -a", "echo '{\"</tool_call>\"}' \u00e9")
TWO_CALLS = f"Look.\n{CALL}\nand\n{SECOND}\n"


async def test_a_call_is_seen_whole_after_the_answer_is_stored(
    with_tools: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Some agents run a call as soon as it ends, others as soon as its arguments are JSON."""
    for number, path in enumerate(("/v1/messages", "/v1/chat/completions", "/v1/responses"), start=1):
        await script(engine, TWO_CALLS, until="and\n", hold=path)
        body = CALLS_IN[path] | {"model": "policy", "stream": True}
        text = before = ""
        async with (
            httpx.AsyncClient(base_url=with_tools, headers={"x-api-key": opened.token}, timeout=300) as http,
            http.stream("POST", path, json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                text += line
                if "Look." in line and not before:
                    before = text
                    await engine.release(path)
        assert before and "bash" not in before and text.count('ls -a\\",\\"n\\":3}') >= 1
        (row,) = (await opened.wait_delivered(number + 1))[-1:]
        assert ids_from_bytes(row.sampled_ids).tolist() == engine.ids(TWO_CALLS)
        assert "echo '{" in text and sum(text.count(one) for one in ENDS) == ALL_ENDS[path]


async def test_a_stop_sequence_behind_thinking_ends_its_answer_and_changes_no_other_stream(
    live: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """The stop sequence begins with a line break that is no part of the text."""
    await engine.say("<think>\nI\n</think>\n\nObservation: x", "<think>\nI\n</think>\n\nObservation: x")
    chat_body = {"model": "policy", "messages": ASK, "stream": True, "stop": ["\nObservation:"]}
    async with anthropic_client(live, opened.token) as client, httpx.AsyncClient(timeout=300) as http:
        async with client.messages.stream(
            model="policy", messages=ASK, max_tokens=90, stop_sequences=["\nObservation:"]
        ) as stream:
            message = await stream.get_final_message()
        headers = {"authorization": f"Bearer {opened.token}"}
        chat = (await http.post(live + "/v1/chat/completions", json=chat_body, headers=headers)).text
    assert [block.type for block in message.content] == ["thinking"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\nObservation:")
    assert '"reasoning_content":"I"' in chat and "Obs" not in chat and '"finish_reason":"stop"' in chat
    await opened.wait_delivered(3)
    await script(engine)
    async with asyncio.timeout(300), half_answer(live, opened.token, "later", "Looking around"):
        await engine.release("gate")


ALL_ENDS = {"/v1/messages": 3, "/v1/chat/completions": 1, "/v1/responses": 3}
ENDS = ("event: content_block_stop", '"finish_reason":"tool_calls"', "event: response.output_item.done")
CALLS_IN: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": ASK, "max_tokens": 95, "tools": ANTHROPIC_TOOLS},
    "/v1/chat/completions": {"messages": ASK, "tools": CHAT_TOOLS},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}]},
}


async def test_chat_is_seen_while_it_is_sampled(live: str, engine: ScriptedEngine, opened: Opened) -> None:
    await script(engine)
    thinking = text = ""
    calls: dict[int, str] = {}
    async with asyncio.timeout(300), chat_client(live, opened.token) as client:
        stream = await client.chat.completions.create(model="policy", messages=ASK, tools=CHAT_TOOLS, stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta
            thinking += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
            for call in delta.tool_calls or []:
                function: Any = call.function
                calls[call.index] = calls.get(call.index, "") + function.arguments
            if "Looking around" in text and not calls:
                assert thinking == "first look"
                await engine.release("gate")
    assert (thinking, text, calls) == ("first look", "Looking around.", {0: '{"command":"ls -a","n":3}'})


async def test_responses_are_seen_while_they_are_sampled(live: str, engine: ScriptedEngine, opened: Opened) -> None:
    await script(engine)
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA}]
    text = ""
    items: list[Any] = []
    numbers: list[int] = []
    async with asyncio.timeout(300), chat_client(live, opened.token) as client:
        stream = await client.responses.create(model="policy", input="x", tools=tools, stream=True)
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
                if "Looking around" in text:
                    assert [one.type for one in items] == ["reasoning"]
                    await engine.release("gate")
            if event.type == "response.output_item.done":
                items.append(event.item)
            if event.type == "response.completed":
                final = event.response
    assert text == "Looking around." and numbers == list(range(len(numbers)))
    assert [one.model_dump() for one in final.output] == [one.model_dump() for one in items]
    assert [one.type for one in items] == ["reasoning", "message", "function_call"]


async def test_the_next_engine_continues_what_a_client_has_seen(
    adapter: str, opened: Opened, database: Database, renderer: Renderer, engine: ScriptedEngine
) -> None:
    """Every token is stored as it was sampled; those of the dead engine, whose weights are unknown, have no version."""
    async with database.begin() as conn:
        await engines.set_engine_gone(conn, engine.id)
    async with engine_process() as (address, process), engine_process() as other_process:
        mortal = await register(database, renderer, address, process)
        ids = mortal.ids("one two three four")
        await mortal.script({"ids": ids, "die": True, "at": 5})
        async with chat_client(adapter, opened.token) as client:
            asking = asyncio.create_task(stream_text(client, "continue"))
            await asyncio.to_thread(process.wait)
            other = await register(database, renderer, *other_process, " and more")
            async with database.begin() as conn:
                await engines.set_engine_gone(conn, mortal.id)
            assert await asking == renderer.tokenizer.decode(ids[:5]) + " and more"
        (call,) = (await other.seen())["calls"]
    (row,) = await opened.wait_delivered(1)
    whole = ids[:5] + other.ids(" and more")
    assert ids_from_bytes(row.sampled_ids).tolist() == whole and row.engine_id == other.id and row.logprobs_valid
    assert call["ids"][-5:] == ids[:5] and call["sampling"]["max_tokens"] == 95
    assert [(span["version"], span["start"], span["end"]) for span in row.version_spans] == [
        ("default", 0, 5),
        ("default", 5, len(whole)),
    ]


async def stream_text(client: openai.AsyncOpenAI, question: str, headers: dict[str, str] | None = None) -> str:
    messages: Any = [{"role": "user", "content": question}]
    stream = await client.chat.completions.create(
        model="policy", messages=messages, stream=True, extra_headers=headers or {}
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@contextlib.asynccontextmanager
async def half_answer(address: str, token: str, question: str, until: str) -> AsyncIterator[None]:
    """A client that has read a part of its answer, and leaves at the end of the block."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True}
    headers = {"authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(base_url=address, headers=headers, timeout=300) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        text = ""
        lines = reply.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                text += orjson.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if until in text:
                break
        yield


async def test_a_client_that_lost_half_an_answer_gets_the_same_tokens(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await script(engine, "one two three four five", until="one two")
    async with half_answer(adapter, opened.token, "lost", "one two"):
        pass
    async with asyncio.timeout(300):
        while (await opened.turns())[-1].lease_owner is not None:
            await asyncio.sleep(0.02)
        async with half_answer(adapter, opened.token, "lost", "one two"):  # seen although no token has come since
            # The text is shown before the row has its owner.
            while (await opened.turns())[-1].lease_owner is None:
                await asyncio.sleep(0.02)
        while (await opened.turns())[-1].lease_owner is not None:
            await asyncio.sleep(0.02)
    async with chat_client(adapter, opened.token) as client:
        again = asyncio.create_task(stream_text(client, "lost"))
        while (await opened.turns())[-1].lease_owner is None:
            await asyncio.sleep(0.02)
        await engine.release("gate")
        assert await again == "one two three four five"
    assert len((await engine.seen())["calls"]) == 1 and len(await opened.wait_delivered(1)) == 1


async def test_half_an_answer_of_a_killed_adapter_is_stored_nowhere(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    settings = adapter_settings(postgres_url, model_dir)
    await script(engine, "one two three", until="one two")
    await engine.say("another")
    async with adapter_process(settings) as process:
        address = f"http://127.0.0.1:{settings.port}"
        with contextlib.suppress(httpx.TransportError):
            async with half_answer(address, opened.token, "x", "one"):
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)
    async with adapter_here(settings) as address, chat_client(address, opened.token) as client:
        assert await stream_text(client, "x") == "another"
    (row,) = await opened.wait_delivered(1)
    assert ids_from_bytes(row.sampled_ids).tolist() == engine.ids("another") and row.ordinal == 0


async def test_a_stream_whose_row_another_process_has_completed_fails_and_its_retry_gets_that_answer(
    postgres_url: str, model_dir: Path, adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """The first process cannot reach the store, so its lease expires, and a retry is generated by the second one."""
    await script(engine, "one two three", until="one two")
    await engine.say("another")
    retry = {"x-stainless-retry-count": "1"}
    async with (
        cut_off(postgres_url) as (url, line),
        adapter_here(adapter_settings(url, model_dir)) as address,
        chat_client(address, opened.token) as client,
        chat_client(adapter, opened.token) as elsewhere,
    ):
        first = asyncio.create_task(stream_text(client, "x"))
        await engine.wait_for_calls(1)
        line.cut()
        assert await stream_text(elsewhere, "x", retry) == "another"
        line.mend()
        await engine.release("gate")
        with pytest.raises(openai.APIError, match="try again"):
            await first
        assert await stream_text(client, "x", retry) == "another"
    (row,) = await opened.wait_delivered(1)
    assert ids_from_bytes(row.sampled_ids).tolist() == engine.ids("another")
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, opened.rollout_id, 1))
    assert chain.num_trained == row.num_sampled


async def test_what_is_decided_at_the_end_is_right_in_a_stream(
    with_tools: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """A stop sequence, a call that is none, one call of two, a format that is violated."""
    await engine.say("one STOP two", "Look.\n" + CALL[:60], f"Look.\n{CALL}\n{CALL}", "no JSON")
    async with anthropic_client(with_tools, opened.token) as client:

        async def ask_for(number: int, **fields: Any) -> anthropic.types.Message:
            asked: Any = [{"role": "user", "content": f"go {number}"}]
            async with client.messages.stream(model="policy", messages=asked, max_tokens=95, **fields) as stream:
                return await stream.get_final_message()

        stopped = await ask_for(1, stop_sequences=["STOP"])
        cut = await ask_for(2, tools=ANTHROPIC_TOOLS)
        one = await ask_for(3, tools=ANTHROPIC_TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        violated = await ask_for(4, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert (stopped.stop_reason, stopped.content[0].text) == ("stop_sequence", "one ")  # type: ignore[union-attr]
    assert [block.type for block in cut.content] == ["text"]
    assert cut.content[0].text == "Look.\n" + CALL[:60]  # type: ignore[union-attr]
    assert [block.type for block in one.content] == ["text", "tool_use"]
    assert (violated.stop_reason, violated.content[0].text) == ("refusal", "no JSON")  # type: ignore[union-attr]
