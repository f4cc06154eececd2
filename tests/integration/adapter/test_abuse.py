"""Any request gets the vendor's error with a sentence, never a 500, and its session stays usable.

The sandbox is not trusted, and any program in it may send requests to this port.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.integration.adapter.conftest import Opened, ScriptedEngine

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "sys"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        ],
        "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "stop": ["END"],
        "stream": False,
        "stream_options": None,
        "max_tokens": 20,
        "n": 1,
    },
    "/v1/messages": {
        "model": "policy",
        "system": [{"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "a.py"},
                    {"type": "text", "text": "on"},
                ],
            },
        ],
        "tools": [{"name": "bash", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["END"],
        "max_tokens": 20,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "x"},
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "sys",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "dGhpbms="},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "description": "d", "parameters": SCHEMA},
            {"type": "custom", "name": "patch"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 20,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    },
}
VALID["/v1/messages/count_tokens"] = {key: value for key, value in VALID["/v1/messages"].items() if key != "max_tokens"}
KEYS = st.sampled_from(["type", "role", "content", "text", "id"]) | st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def is_answer_or_vendor_error(path: str, reply: httpx.Response) -> bool:
    """Return whether the reply is an answer, or the vendor's error with a sentence and a status that its SDK knows."""
    if reply.status_code == 200:
        return True
    body = reply.json()
    shaped = body["type"] == "error" if path.startswith("/v1/messages") else "code" in body["error"]
    return (
        400 <= reply.status_code < 500 and shaped and bool(body["error"]["type"]) and len(body["error"]["message"]) > 5
    )


async def post(
    address: str, token: str, path: str, content: bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as http:
        return await http.post(path, content=content, headers={"authorization": f"Bearer {token}"} | (headers or {}))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a body, without its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([at] if at else []) + [place for key, one in inner for place in places(one, (*at, key))]


def changed(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(body))
    at = copy
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return copy


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
@FUZZ
async def test_any_value_in_any_place(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, data: st.DataObject
) -> None:
    body = VALID[path]
    for _ in range(data.draw(st.integers(1, 2))):
        body = changed(body, data.draw(st.sampled_from(places(body))), data.draw(JSON))
    reply = await post(adapter, opened.token, path, json.dumps(body).encode())
    assert is_answer_or_vendor_error(path, reply), (reply.status_code, reply.text[:300], body)


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
@FUZZ
async def test_broken_bytes(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(VALID[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"\\ud800", b"NaN", b"1e999"])
        )
    reply = await post(adapter, opened.token, path, bytes(body))
    assert is_answer_or_vendor_error(path, reply), (reply.status_code, reply.text[:300], bytes(body))


HEADERS = (
    "authorization",
    "x-api-key",
    "x-claude-code-agent-id",
    "x-stainless-retry-count",
    "content-type",
    "anthropic-version",
    "x-openai-subagent",
)


@given(data=st.data())
@FUZZ
async def test_any_header(adapter: str, engine: ScriptedEngine, opened: Opened, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=300)
    values = values.map(lambda value: value.strip(" ")) | st.sampled_from(["Bearer", "Bearer x", "Basic eDp5"])
    headers = data.draw(st.dictionaries(st.sampled_from(HEADERS), values, max_size=4))
    async with httpx.AsyncClient(base_url=adapter, timeout=120, trust_env=False) as http:
        sent = {"authorization": f"Bearer {opened.token}"} | headers
        raw = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        reply = await http.post(path, json=VALID[path], headers=raw)
    assert is_answer_or_vendor_error(path, reply), (reply.status_code, reply.text[:300], headers)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}",
        b'{"input":' + b'{"a":' * 2_000_000 + b"1" + b"}" * 2_000_000 + b"}",
        b'{"tools":' + b'[{"parameters":{"properties":' * 500 + b"1" + b"}}]" * 500 + b"}",
        b"\xff\xfe" * 100,
    ],
    ids=["lists", "objects", "schemas", "no text"],
)
async def test_ten_megabytes_of_nesting(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, body: bytes
) -> None:
    reply = await post(adapter, opened.token, path, body)
    assert reply.status_code == 400 and is_answer_or_vendor_error(path, reply), reply.text[:300]
    assert (await post(adapter, opened.token, path, json.dumps(VALID[path]).encode())).status_code == 200


async def test_deeply_nested_valid_values_cause_no_recursion_error(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Deep tool arguments and schemas inside an otherwise valid request."""
    deep: Any = 1
    for _ in range(3000):
        deep = {"a": deep}
    text = "1"
    for _ in range(3000):
        text = '{"a":' + text + "}"
    for path in PATHS:
        body = json.dumps(VALID[path])
        for old, new in (
            ('{"command": "ls"}', text),
            (json.dumps(SCHEMA), text),
            (r'"{\"command\": \"ls\"}"', json.dumps(text)),
        ):
            reply = await post(adapter, opened.token, path, body.replace(old, new).encode())
            assert is_answer_or_vendor_error(path, reply), (path, old, reply.status_code, reply.text[:300])


NONSENSE = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
CALL = {"type": "tool_use", "id": "c1", "name": "bash", "input": {}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BAD: list[tuple[str, str, tuple[Any, ...], Any, str]] = [
    ("unknown model", "*", ("model",), "claude-9", "not served"),
    ("no schema", MESSAGES, ("tools", 0, "input_schema"), NONSENSE, "JSON schema"),
    ("no schema", CHAT, ("tools", 0, "function", "parameters"), {"type": "object", "required": 3}, "JSON schema"),
    ("no schema", RESPONSES, ("tools", 0, "parameters"), {"type": "object", "properties": 1}, "JSON schema"),
    ("unknown part", MESSAGES, ("messages", 0, "content"), [{"type": "hologram"}], "hologram"),
    ("unknown part", CHAT, ("messages", 1, "content"), [{"type": "hologram"}], "hologram"),
    ("unknown part", RESPONSES, ("input", 0, "content"), [{"type": "hologram"}], "hologram"),
    ("assistant first", MESSAGES, ("messages", 0), {"role": "assistant", "content": "x"}, "first"),
    ("empty content", MESSAGES, ("messages", 0, "content"), [], "non-empty"),
    ("empty content", CHAT, ("messages", 1, "content"), None, "null"),
    ("two equal ids", MESSAGES, ("messages", 1, "content"), [CALL, CALL], "unique"),
    ("result without a call", MESSAGES, ("messages", 1, "content"), "x", "no corresponding"),
    ("result without a call", CHAT, ("messages", 3, "tool_call_id"), "c9", "no corresponding"),
    ("result without a call", RESPONSES, ("input", 3, "call_id"), "c9", "no corresponding"),
    ("no limit", CHAT, ("max_tokens",), 0, "at least 1"),
]


@pytest.mark.parametrize(("what", "path", "place", "value", "word"), BAD, ids=[f"{one[0]} {one[1]}" for one in BAD])
async def test_each_mistake_is_named(
    adapter: str,
    engine: ScriptedEngine,
    opened: Opened,
    what: str,
    path: str,
    place: tuple[Any, ...],
    value: Any,
    word: str,
) -> None:
    for one in PATHS if path == "*" else (path,):
        reply = await post(adapter, opened.token, one, json.dumps(changed(VALID[one], place, value)).encode())
        assert reply.status_code in (400, 404) and is_answer_or_vendor_error(one, reply), reply.text
        assert word in reply.json()["error"]["message"]
        assert (await post(adapter, opened.token, one, json.dumps(VALID[one]).encode())).status_code == 200


OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "adapter", "version": "1"},
    "paths": {
        path: {
            "post": {
                "parameters": [
                    {"name": "x-claude-code-agent-id", "in": "header", "schema": {"type": "string"}},
                    {"name": "x-stainless-retry-count", "in": "header", "schema": {"type": "integer", "minimum": 0}},
                    {"name": "beta", "in": "query", "schema": {"type": "boolean"}},
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "required": ["model", history],
                                "properties": {
                                    "model": {"const": "policy"},
                                    history: {
                                        "type": "array",
                                        "minItems": 1,
                                        "items": {
                                            "type": "object",
                                            "required": ["role", "content"],
                                            "properties": {
                                                "role": {"enum": ["user", "assistant", "system", "tool"]},
                                                "content": {
                                                    "oneOf": [
                                                        {"type": "string"},
                                                        {
                                                            "type": "array",
                                                            "items": {
                                                                "type": "object",
                                                                "properties": {
                                                                    "type": {"type": "string"},
                                                                    "text": {"type": "string"},
                                                                },
                                                            },
                                                        },
                                                    ]
                                                },
                                            },
                                        },
                                    },
                                    "max_tokens": {"type": "integer", "minimum": 1},
                                    "stream": {"type": "boolean"},
                                    "tools": {"type": "array", "items": {"type": "object"}},
                                },
                            }
                        }
                    },
                },
                "responses": {"200": {"description": "an answer"}, "400": {"description": "the vendor's error"}},
            }
        }
        for path, history in (
            ("/v1/chat/completions", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/responses", "input"),
        )
    },
}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", list(OPENAPI["paths"]))
async def test_schemathesis(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, mode: GenerationMode
) -> None:
    """Requests generated from a schema of the protocol, and requests generated to violate it."""
    operation = schemathesis.openapi.from_dict(OPENAPI)[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        reply = case.call(base_url=adapter, headers={"x-api-key": opened.token}, timeout=120)
        assert reply.status_code < 500, (reply.status_code, reply.text[:300], case.body)

    await asyncio.to_thread(check)
