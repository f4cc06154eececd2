"""Small things that HTTP clients do differently: compressed bodies, slashes, no model, and what errors tell them."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings

QUESTION: Any = [{"role": "user", "content": "go"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 50},
    "/v1/responses": {"input": "go"},
}


def client(address: str, opened: Opened) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, headers={"x-api-key": opened.token}, timeout=300)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("Deflate", zlib.compress),
        ("identity", bytes),
        ("zstd", zstandard.compress),  # Codex
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),  # clients that leave zlib's head out
        ("gzip, identity", gzip.compress),
    ],
)
async def test_a_compressed_body_is_read(
    adapter: str,
    engine: ScriptedEngine,
    opened: Opened,
    path: str,
    encoding: str,
    pack: Callable[[bytes], bytes],
) -> None:
    await engine.say("One.")
    async with client(adapter, opened) as http:
        sent = pack(json.dumps(BODIES[path]).encode())
        reply = await http.post(path, content=sent, headers={"content-encoding": encoding})
    assert reply.status_code == 200 and "One." in reply.text


async def test_a_body_that_cannot_be_decompressed_is_refused_with_its_encoding(
    postgres_url: str, model_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    packed = gzip.compress(json.dumps(BODIES["/v1/messages"]).encode())
    framed = zstandard.compress(json.dumps(BODIES["/v1/messages"]).encode())
    bomb = gzip.compress(b" " * 5_000_000)
    refused: list[tuple[str, bytes, int, str]] = [
        ("br", b"x", 415, "content-encoding: 'br' is not read here"),
        ("gzip, gzip", packed, 415, "content-encoding: 'gzip, gzip' is not read here"),
        ("gzip", b"{}", 400, "content-encoding: the body is not gzip"),
        ("gzip", packed[:-9], 400, "content-encoding: the body is not one whole gzip stream"),
        ("gzip", packed + b"x", 400, "content-encoding: the body is not one whole gzip stream"),
        ("deflate", b"\xff", 400, "content-encoding: the body is not deflate"),
        ("zstd", packed, 400, "content-encoding: the body is not zstd"),
        ("zstd", framed[:-1], 400, "content-encoding: the body is not one whole zstd stream"),
        ("zstd", framed + framed, 400, "content-encoding: the body is not one whole zstd stream"),
        ("zstd", zstandard.compress(b" " * 5_000_000), 413, "larger than 1000000 bytes without its content-encoding"),
        ("gzip", bomb, 413, "larger than 1000000 bytes without its content-encoding"),
    ]
    async with (
        adapter_here(adapter_settings(postgres_url, model_dir, max_body_bytes=1_000_000)) as address,
        client(address, opened) as http,
    ):
        for path in BODIES:
            for encoding, sent, status, sentence in refused:
                reply = await http.post(path, content=sent, headers={"content-encoding": encoding})
                assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (status, True), reply.text
                assert ("zstd" in reply.headers.get("accept-encoding", "")) is (status == 415)
        assert (await http.post("/v1/messages", json=BODIES["/v1/messages"])).status_code == 200


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("sent", [b"", b" \n"])
async def test_an_empty_body_is_called_so(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, sent: bytes
) -> None:
    async with client(adapter, opened) as http:
        reply = await http.post(path, content=sent)
    assert reply.status_code == 400 and "the body is empty" in reply.json()["error"]["message"]


async def test_a_slash_at_the_end_of_a_path_changes_nothing(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(*["One."] * len(BODIES))
    async with client(adapter, opened) as http:
        for path, body in BODIES.items():
            reply = await http.post(path + "/", json=body)
            assert reply.status_code == 200 and "One." in reply.text
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
        assert (await http.get("/v1/models/policy/")).json()["id"] == "policy"
        assert (await http.get("/health/")).status_code == 200
        lost = await http.post("/v1/nothing/", json={})
    assert lost.status_code == 404 and "unknown route" in lost.json()["error"]["message"]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("model", [{}, {"model": ""}])
async def test_an_answer_to_a_request_without_a_model_names_the_sessions(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, model: dict[str, str]
) -> None:
    await engine.say("One.", "Two.")
    async with client(adapter, opened) as http:
        assert (await http.post(path, json=BODIES[path] | model)).json()["model"] == "policy"
        streamed = await http.post(path, json=BODIES[path] | model | {"stream": True})
    assert '"model":"policy"' in streamed.text and '"model":""' not in streamed.text


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/chat/completions", {"messages": [*QUESTION, {"role": "user", "content": 5}]}, "messages[1].content"),
        ("/v1/chat/completions", {"messages": [*QUESTION, {"role": "x"}]}, "messages[1].role"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"n": 2}, "n"),
        ("/v1/chat/completions", {"made_up": 1}, "made_up"),
        ("/v1/chat/completions", {"model": "other"}, "model"),
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}]},
            "messages[0].content[1]",
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ("/v1/responses", {"previous_response_id": "r"}, "previous_response_id"),
    ],
)
async def test_an_error_names_the_field(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, changes: dict[str, Any], param: str
) -> None:
    async with client(adapter, opened) as http:
        error = (await http.post(path, json=BODIES[path] | changes)).json()["error"]
    assert error["param"].startswith(param) and (param == "model" or param in error["message"])


async def test_an_error_without_a_field_has_no_param(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    async with client(adapter, opened) as http:
        for sent in (b"", b"[1]", b"{"):
            assert (await http.post("/v1/chat/completions", content=sent)).json()["error"]["param"] is None
        answered = [*QUESTION, {"role": "assistant", "content": "a"}]
        error = (await http.post("/v1/chat/completions", json={"messages": answered})).json()["error"]
    assert error["param"] is None and "last message" in error["message"]
