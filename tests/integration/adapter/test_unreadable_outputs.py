"""No output of the policy costs its turn: an output that no parser can read is stored and returned as text.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.dialects.base import InvalidRequestError
from adapter.vllm_parsers import VllmParsers
from store.database import Database
from store.fork_report import fork_report
from tests.integration.adapter.conftest import ScriptedEngine, open_rollout
from tests.integration.adapter.test_dialects import THOUGHT

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"type": "object"},
    },
    "required": ["command"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": SCHEMA}}]
QUESTION: Any = [{"role": "user", "content": "go"}]
LIMITS = {"max_context_tokens": 100_000, "max_response_tokens": 20_000}


def call(name: str, value: str) -> str:
    return (
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
        f"<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


async def post(address: str, token: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address, headers={"x-api-key": token}, timeout=300) as http:
        return await http.post("/v1/chat/completions", json={"model": "policy", "tools": TOOLS} | body)


def answer_of(response: httpx.Response, streams: bool) -> tuple[str, list[Any]]:
    """The text and the calls' arguments of an answer."""
    if not streams:
        message = response.json()["choices"][0]["message"]
        return message["content"] or "", [one["function"]["arguments"] for one in message.get("tool_calls", [])]
    text = ""
    calls: dict[int, str] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line[6:])["choices"][0]["delta"]
        text += delta.get("content") or ""
        for one in delta.get("tool_calls", []):
            calls[one["index"]] = calls.get(one["index"], "") + one["function"]["arguments"]
    return text, list(calls.values())


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_too_deep_for_a_row_is_text(
    thinking: str, engine: ScriptedEngine, database: Database, streams: bool
) -> None:
    output = call("o", '{"a":' * 250 + "1" + "}" * 250)
    opened = await open_rollout(database, **LIMITS)
    await engine.say(THOUGHT + "Hm.\n" + output)
    response = await post(thinking, opened.token, {"messages": QUESTION, "stream": streams})
    text, calls = answer_of(response, streams)
    assert (response.status_code, text, calls) == (200, "Hm.\n" + output, [])
    (turn,) = await opened.wait_delivered(1)
    assert (turn.state, turn.num_sampled) == ("completed", len(engine.ids(THOUGHT + "Hm.\n" + output)))
    assert turn.unread_call == "arguments"
    assert len((await engine.seen())["calls"]) == 1


@pytest.mark.parametrize("name", ["o", "n"])
async def test_a_value_that_is_not_of_its_type_is_what_was_written(
    thinking: str, engine: ScriptedEngine, database: Database, name: str
) -> None:
    opened = await open_rollout(database, **LIMITS)
    await engine.say(THOUGHT + call(name, "[" * 1100))
    text, calls = answer_of(await post(thinking, opened.token, {"messages": QUESTION}), streams=False)
    assert text == "" and [json.loads(one) for one in calls] == [{"command": "ls", name: "[" * 1100}]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_the_parser_would_cut_is_text_and_is_counted(
    thinking: str, engine: ScriptedEngine, database: Database, streams: bool
) -> None:
    """Its tokens are stored whole, and it is recognised when it comes back."""
    opened = await open_rollout(database, **LIMITS)
    output = call("s", "A value ends with </parameter> here.\nlast line")
    await engine.say(THOUGHT + output, "</think>Done.")
    response = await post(thinking, opened.token, {"messages": QUESTION, "stream": streams})
    assert answer_of(response, streams) == (output, [])
    sent = [{"role": "assistant", "content": output}, {"role": "user", "content": "That was no call."}]
    await post(thinking, opened.token, {"messages": [*QUESTION, *sent]})
    first, second = await opened.wait_delivered(2)
    assert (first.num_sampled, first.unread_call) == (len(engine.ids(THOUGHT + output)), "changed")
    assert second.parent_turn_id == first.id and second.unread_call is None
    async with database.begin() as conn:
        report = await fork_report(conn, "run-1")
    assert report.unread_calls == {"changed": 1} and "would have changed" in report.alarms[-1]


@pytest.mark.parametrize("depth", range(244, 256))
async def test_the_deepest_call_that_a_client_gets_can_be_sent_back(
    thinking: str, engine: ScriptedEngine, database: Database, depth: int
) -> None:
    """Also as an edit, which stores it once more in the request's row, in more levels."""
    opened = await open_rollout(database, **LIMITS)
    await engine.say(THOUGHT + call("o", '{"a":' * depth + "1" + "}" * depth), "</think>Done.", "</think>Done.")
    first = (await post(thinking, opened.token, {"messages": QUESTION})).json()["choices"][0]["message"]
    behind = [{"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in first.get("tool_calls", [])]
    behind = behind or [{"role": "user", "content": "on"}]
    for sent in (first, first | {"content": "an edit"}):
        assert (await post(thinking, opened.token, {"messages": [*QUESTION, sent, *behind]})).status_code == 200
    assert [turn.state for turn in await opened.turns()] == ["completed"] * 3


async def test_a_history_too_deep_for_a_row_is_refused(
    thinking: str, engine: ScriptedEngine, database: Database
) -> None:
    opened = await open_rollout(database, **LIMITS)
    statuses = []
    for depth in range(244, 256):
        await engine.say("</think>Done.")
        arguments = '{"a":' * depth + "1" + "}" * depth
        sent = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        history = [*QUESTION, {"role": "assistant", "tool_calls": [sent]}]
        history.append({"role": "tool", "tool_call_id": "c", "content": "ok"})
        statuses.append((await post(thinking, opened.token, {"messages": history})).status_code)
    assert set(statuses) == {200, 400} and statuses == sorted(statuses)


@pytest.mark.parametrize("description", [{}, [], 5, True])
async def test_a_tool_that_the_output_parser_cannot_take_is_refused_before_it_is_sampled(
    thinking: str, engine: ScriptedEngine, database: Database, description: Any
) -> None:
    opened = await open_rollout(database, **LIMITS)
    async with asyncio.timeout(300), httpx.AsyncClient(base_url=thinking) as http:
        while (await http.get("/health")).json()["status"] != "ok":  # the parsers are being imported
            await asyncio.sleep(0.1)
    function = {"name": "bash", "description": description, "parameters": SCHEMA}
    for path, tool, field in (
        ("/v1/chat/completions", {"type": "function", "function": function}, "tools[0].function.description"),
        ("/v1/responses", {"type": "function"} | function, "tools[0].description"),
        ("/v1/messages", function | {"input_schema": SCHEMA}, "tools.0.description"),
    ):
        body: dict[str, Any] = {"model": "policy", "tools": [tool], "max_tokens": 9}
        body |= {"input": "go", "max_output_tokens": 9} if path.endswith("responses") else {"messages": QUESTION}
        if path.endswith("responses"):
            del body["max_tokens"]
        async with httpx.AsyncClient(base_url=thinking, headers={"x-api-key": opened.token}, timeout=300) as http:
            response = await http.post(path, json=body)
        assert response.status_code == 400 and f"{field}: a string expected" in response.text
    assert not await opened.turns()


def test_tools_that_vllm_refuses_are_the_clients_error(model_dir: Path) -> None:
    """Also if a dialect let them through."""
    parsers = VllmParsers(model_dir, "qwen3_coder", None)
    parsers.take_tools([{"type": "function", "function": {"description": {}}}])  # not loaded: nothing is made
    parsers.load()
    with pytest.raises(InvalidRequestError, match=r"^tools: the output parser cannot take them: function\.name: "):
        parsers.take_tools([{"type": "function", "function": {"description": "d"}}])
