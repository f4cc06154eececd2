"""A client whose stream was cut keeps a part of a call and sends it with each later request: it is served as text."""

from typing import Any

import httpx
import pytest

from tests.integration.adapter.conftest import Opened, ScriptedEngine

PART = '{"command": "ls'
CHAT_PART = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": PART}}
CHAT_WHOLE = {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
HISTORIES: list[tuple[str, str, list[Any]]] = [
    (
        "/v1/chat/completions",
        "messages",
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "Hm.", "tool_calls": [CHAT_PART, CHAT_WHOLE]},
            {"role": "tool", "tool_call_id": "c1", "content": "interrupted"},
            {"role": "tool", "tool_call_id": "c2", "content": "a.py"},
        ],
    ),
    (
        "/v1/responses",
        "input",
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "Hm."},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": PART},
            {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "interrupted"},
            {"type": "function_call_output", "call_id": "c2", "output": "a.py"},
        ],
    ),
    (
        "/v1/messages",
        "messages",
        [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Hm."},
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": PART},
                    {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "interrupted"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "a.py"},
                ],
            },
        ],
    ),
]


@pytest.mark.parametrize(("path", "field", "history"), HISTORIES, ids=[path for path, _, _ in HISTORIES])
async def test_a_part_of_a_call_in_a_history_is_text(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, field: str, history: list[Any]
) -> None:
    """In the first request, and if the parser goes on behind it."""
    await engine.say("one", "two", "three")
    later = [{"role": "user", "content": "and"}]
    prompts = []
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=300) as http:
        for sent in (history[:1], history, [*history, {"role": "assistant", "content": "two"}, *later]):
            limit = {} if field == "input" else {"max_tokens": 50}
            response = await http.post(path, json={"model": "policy", field: sent} | limit)
            assert response.status_code == 200, response.text
            prompts.append((await engine.seen())["calls"][-1]["ids"])
    decode = engine.renderer.tokenizer.plain.decode
    shown = [decode(ids, skip_special_tokens=False) for ids in prompts]
    for text in shown[1:]:
        assert "Hm.\nbash(" + PART + ")" in text and text.index("interrupted") < text.index("a.py")
    assert shown[2].startswith(shown[1]) and "<|im_start|>user\ninterrupted" in shown[2]
    assert [turn.fork_cause for turn in await opened.wait_delivered(3)][2] is None


@pytest.mark.parametrize("arguments", ["[1]", "5", '"x"', "{", "null", ""])
async def test_arguments_that_are_no_object_are_no_error(
    adapter: str, engine: ScriptedEngine, opened: Opened, arguments: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    history: list[Any] = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": "interrupted"})
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=300) as http:
        assert (await http.post("/v1/chat/completions", json={"messages": history})).status_code == 200
