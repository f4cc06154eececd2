"""Clients that send answers back in another form keep one stream: other ids, other numbers.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, THOUGHT

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

PATH = "/v1/chat/completions"
PARSERS = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
LIMITS = {"max_context_tokens": 20_000, "max_response_tokens": 2000}
NUM_TURNS = 5
Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def outputs(between: str = "") -> list[str]:
    """Answers with thoughts of their own, the last one without a call."""
    thoughts = [THOUGHT.replace("look", f"look {number}") for number in range(NUM_TURNS)]
    return [*(one + between + CALL for one in thoughts[:-1]), thoughts[-1] + "Done."]


async def converse(
    address: str, opened: Opened, messages: list[Any], change: Change, num_turns: int, **more: Any
) -> None:
    """Continue a conversation over Chat, whose whole history is sent as `change` returns it. `more`: other fields."""
    async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http:
        for _ in range(num_turns):
            sent = {"model": "policy", "messages": change(json.loads(json.dumps(messages))), "tools": CHAT_TOOLS}
            reply = await http.post(PATH, json=sent | more)
            assert reply.status_code == 200, reply.text
            answer = reply.json()["choices"][0]["message"]
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": one["id"], "content": f"out {at}"}
                for at, one in enumerate(answer.get("tool_calls", []))
            ]


async def causes(opened: Opened) -> list[Any]:
    return [turn.fork_cause for turn in await opened.turns()]


async def num_thoughts(engine: ScriptedEngine) -> list[int]:
    """Return for each prompt how often it shows a thought."""
    decode = engine.renderer.tokenizer.plain.decode
    calls = (await engine.seen())["calls"]
    return [decode(call["ids"], skip_special_tokens=False).count("first look") for call in calls]


# ---------------------------------------------------------------- ids


def new_ids(start: str) -> Change:
    """Other ids in each request, as of a client that keeps no ids."""
    number = count()

    def renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        known = [call["id"] for message in messages for call in message.get("tool_calls", [])]
        fresh = {one: f"{start}{next(number)}" for one in known}
        for message in messages:
            for call in message.get("tool_calls", []):
                call["id"] = fresh[call["id"]]
            if "tool_call_id" in message:
                message["tool_call_id"] = fresh[message["tool_call_id"]]
        return messages

    return renamed


def without_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != "reasoning_content"} for one in messages]


@pytest.mark.parametrize("between", ["", "Text. \n\n"])
@pytest.mark.parametrize("sends_reasoning", [True, False])
async def test_a_client_with_new_ids_in_each_request_has_one_stream(
    postgres_url: str,
    keeping_dir: Path,
    database: Database,
    engine: ScriptedEngine,
    sends_reasoning: bool,
    between: str,
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*outputs(between))
    renamed = new_ids("client-")
    change: Change = renamed if sends_reasoning else lambda messages: without_reasoning(renamed(messages))
    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, [{"role": "user", "content": "go"}], change, NUM_TURNS)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)
    assert await num_thoughts(engine) == list(range(NUM_TURNS))


async def test_another_process_recognises_the_answers_without_their_ids(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*outputs())
    renamed = new_ids("client-")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for num_turns in (2, NUM_TURNS - 2):
        async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
            await converse(address, opened, messages, lambda sent: without_reasoning(renamed(sent)), num_turns)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)


async def test_a_history_that_two_conversations_have_but_for_ids_is_not_guessed(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    """Two equal samples: without the ids it is not certain which of them came back."""
    opened = await open_rollout(database, **LIMITS)
    await engine.say(THOUGHT + CALL, THOUGHT + CALL, "</think>One.", "</think>Two.")
    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        histories: list[list[Any]] = [[{"role": "user", "content": "go"}] for _ in range(2)]
        for history in histories:
            await converse(address, opened, history, lambda sent: sent, 1)
        await converse(address, opened, histories[1], lambda sent: sent, 1)
        await converse(address, opened, histories[0], new_ids("client-"), 1)
    assert (await causes(opened))[2:] == [None, "restart"]  # its prompt has the tokens of the text, not sampled ones


# ---------------------------------------------------------------- agents by the form of their requests


def answers_as(form: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    return lambda messages: [form(one) if one["role"] == "assistant" else one for one in without_reasoning(messages)]


def with_index(message: dict[str, Any]) -> dict[str, Any]:
    """The calls as they came in a stream, which numbers them."""
    calls = [call | {"index": at} for at, call in enumerate(message.get("tool_calls", []))]
    return message | ({"tool_calls": calls} if calls else {})


AGENTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "Continue": (answers_as(lambda one: one | {"content": one.get("content") or " "}), {"prediction": None}),
    "llama-index": (answers_as(lambda one: with_index(one) | {"content": one.get("content") or None}), {"user": None}),
    "grok-cli": (
        answers_as(lambda one: with_index(one) | {"content": one.get("content") or ""}),
        {
            "search_parameters": {"mode": "auto"},
            "tool_choice": "auto",
            "max_turns": 5,
            "include": ["inline_citations"],
        },
    ),
}


@pytest.mark.parametrize("between", ["", "Text.\n"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_agents_that_are_not_run_here_have_one_stream(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, agent: str, between: str
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*outputs(between))
    change, more = AGENTS[agent]
    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, [{"role": "user", "content": "go"}], change, NUM_TURNS, **more)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)
    assert await num_thoughts(engine) == list(range(NUM_TURNS))


# ---------------------------------------------------------------- numbers


def through_javascript(value: Any) -> Any:
    """Return a JSON value with its numbers as JavaScript would have parsed them."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return int(value) if abs(value) < 2**53 else float(value)
    if isinstance(value, dict):
        return {key: through_javascript(item) for key, item in value.items()}
    return [through_javascript(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("number", ["9007199254740993", "12345678901234567890", "18446744073709551615", "3"])
async def test_integers_that_went_through_javascript_are_no_edit(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, number: str
) -> None:
    opened = await open_rollout(database, **LIMITS)
    call = CALL.replace("\n3\n", f"\n{number}\n")
    await engine.say(*(one.replace(CALL, call) for one in outputs()))

    def change(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages:
            for one in message.get("tool_calls", []):
                arguments = json.loads(one["function"]["arguments"])
                one["function"]["arguments"] = json.dumps(through_javascript(arguments))
        return messages

    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, [{"role": "user", "content": "go"}], change, NUM_TURNS)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)


# ---------------------------------------------------------------- thinking in the text


def inlined(form: str) -> Change:
    """Thinking in the text, as by pydantic-ai and by clients that keep one string of each answer."""

    def change(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages:
            thought = message.pop("reasoning_content", "")
            if thought:
                message["content"] = form.format(thought) + (message.get("content") or "")
        return messages

    return change


@pytest.mark.parametrize("between", ["", "Text.\n"])
@pytest.mark.parametrize("form", ["<think>\n{}\n</think>\n\n", "<think>{}</think>", "\n<think>\n{}\n</think>\n"])
async def test_thinking_that_a_client_writes_into_the_text_stands_in_the_prompt_once(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, form: str, between: str
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*outputs(between))
    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, [{"role": "user", "content": "go"}], inlined(form), NUM_TURNS)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)
    assert await num_thoughts(engine) == list(range(NUM_TURNS))


async def test_an_answer_that_ends_with_its_thinking_in_the_text_is_recognised(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    """Without calls, whose ids would name it."""
    opened = await open_rollout(database, **LIMITS)
    await engine.say(THOUGHT + "One.", THOUGHT + "Two.")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    change = inlined("<think>\n{}\n</think>\n\n")
    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, messages, change, 1)
        await converse(address, opened, [*messages, {"role": "user", "content": "on"}], change, 1)
    assert await causes(opened) == ["root", None] and await num_thoughts(engine) == [0, 1]


# ---------------------------------------------------------------- calls apart


PAIR = THOUGHT + "Both. \n" + CALL + "\n" + CALL.replace("ls -a", "pwd")


async def test_a_loop_that_puts_each_result_behind_its_call_has_one_stream_in_responses(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    """In one process, and then in another one, which has to read the answers' calls first."""
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*[PAIR] * (NUM_TURNS - 1), THOUGHT + "Done.")
    tools = [{"type": "function"} | CHAT_TOOLS[0]["function"]]
    items: list[Any] = [{"role": "user", "content": "go"}]
    for num_turns in (NUM_TURNS - 2, 2):
        async with (
            adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address,
            httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http,
        ):
            for _ in range(num_turns):
                reply = await http.post("/v1/responses", json={"model": "policy", "input": items, "tools": tools})
                assert reply.status_code == 200, reply.text
                for item in reply.json()["output"]:
                    items.append(item)
                    if item["type"] == "function_call":
                        output = f"out {item['arguments']}"
                        items.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)
    assert await num_thoughts(engine) == list(range(NUM_TURNS))


async def test_a_loop_that_sends_each_call_as_a_message_has_one_stream_in_chat(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(*[PAIR] * (NUM_TURNS - 1), THOUGHT + "Done.")

    def change(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        for message in messages:
            calls = message.get("tool_calls", [])
            if message["role"] == "tool":
                at = next(at for at, one in enumerate(sent) if message["tool_call_id"] in str(one.get("tool_calls")))
                sent.insert(at + 1, message)
            elif len(calls) < 2:
                sent.append(message)
            else:
                sent.append(message | {"tool_calls": calls[:1]})
                sent += [{"role": "assistant", "content": None, "tool_calls": [one]} for one in calls[1:]]
        return sent

    async with adapter_here(adapter_settings(postgres_url, keeping_dir, **PARSERS)) as address:
        await converse(address, opened, [{"role": "user", "content": "go"}], change, NUM_TURNS)
    assert await causes(opened) == ["root"] + [None] * (NUM_TURNS - 1)
