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

from ratchet.store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, THOUGHT
from tests.standins.tiny_model import make_tokenizer
from tests.unit.adapter.prompt.test_prompt_builder import KEEPING

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

PATH = "/v1/chat/completions"
PARSERS = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
LIMITS = {"max_context_tokens": 20_000, "max_response_tokens": 2000}
NUM_TURNS = 5
Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def keeping_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keeping")
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(KEEPING)
    return directory


def outputs(between: str = "") -> list[str]:
    """Answers with thoughts of their own, the last one without a call."""
    thoughts = [THOUGHT.replace("look", f"look {number}") for number in range(NUM_TURNS)]
    return [*(one + between + CALL for one in thoughts[:-1]), thoughts[-1] + "Done."]


async def converse(address: str, opened: Opened, messages: list[Any], change: Change, num_turns: int) -> None:
    """Continue a conversation over Chat, whose whole history is sent as `change` returns it."""
    async with httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300) as http:
        for _ in range(num_turns):
            sent = {"model": "policy", "messages": change(json.loads(json.dumps(messages))), "tools": CHAT_TOOLS}
            reply = await http.post(PATH, json=sent)
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
    """How often each prompt shows a thought."""
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


# ---------------------------------------------------------------- numbers


def through_javascript(value: Any) -> Any:
    """What is left of numbers that JavaScript has parsed."""
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
