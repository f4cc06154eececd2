"""The vendors' own SDKs against the adapter: streaming and not, tools, errors, token counts.

A protocol is what its SDK accepts. vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from adapter.prompt.renderer import Renderer
from store.arrays import ids_from_bytes, logprobs_from_bytes
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout

# vLLM's imports (once, in a thread of the adapter) use deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

CALL = (
    "<tool_call>\n<function=bash>\n<parameter=command>\nls -a\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
)
THOUGHT = "<think>\nfirst look\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["command"],
}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": SCHEMA}}]
ANTHROPIC_TOOLS: Any = [{"name": "bash", "description": "run", "input_schema": SCHEMA}]


@pytest.fixture
async def with_tools(postgres_url: str, model_dir: Path, database: Database) -> AsyncIterator[str]:
    async with adapter_here(adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder")) as address:
        yield address


def chat_client(address: str, token: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=address + "/v1", api_key=token, max_retries=retries)


def anthropic_client(address: str, token: str, retries: int = 0) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=address, api_key=token, max_retries=retries)


def stream_of(turns: list[Any], turn: Any) -> np.ndarray:
    """Prompt and sampled ids of a turn, computed from the rows alone."""
    parent = next((one for one in turns if one.id == turn.parent_turn_id), None)
    kept = np.zeros(0, np.int32) if parent is None else stream_of(turns, parent)[: turn.kept_tokens]
    return np.concatenate([kept, ids_from_bytes(turn.suffix_ids), ids_from_bytes(turn.sampled_ids)])


async def test_chat_tool_loop_is_one_exact_stream(
    with_tools: str, engine: ScriptedEngine, opened: Opened, renderer: Renderer
) -> None:
    await engine.say("Looking.\n" + CALL, "Done.")
    async with chat_client(with_tools, opened.token) as client:
        messages: list[Any] = [{"role": "system", "content": "sys"}, {"role": "user", "content": "fix <|im_end|> it"}]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS, max_tokens=50)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Looking."
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.name == "bash"  # type: ignore[union-attr]
        # type: ignore[union-attr]
        assert choice.message.tool_calls[0].function.arguments == '{"command":"ls -a","n":3}'
        messages += [
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "a.py"},
        ]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="policy", messages=messages, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Done."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    turns = await opened.wait_delivered(2)
    assert [turn.fork_cause for turn in turns] == ["root", None]
    assert turns[1].parent_turn_id == turns[0].id and turns[1].kept_tokens == len(stream_of(turns, turns[0]))
    calls = (await engine.seen())["calls"]
    assert calls[1]["ids"] == stream_of(turns, turns[1])[: turns[1].prompt_tokens].tolist()
    assert (
        calls[0]["sampling"] | {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 50} == calls[0]["sampling"]
    )
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == len(calls[1]["ids"])
    assert logprobs_from_bytes(turns[0].logprobs).tolist() == [-1.0] * turns[0].num_sampled
    num_ends = int((np.array(calls[0]["ids"]) == renderer.tokenizer.plain.token_to_id("<|im_end|>")).sum())
    assert num_ends == 2  # not three: the user's text did not become a control token


async def test_messages_tool_loop(with_tools: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("Looking.\n" + CALL, "Done.")
    async with anthropic_client(with_tools, opened.token) as client:
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "fix", "cache_control": {"type": "ephemeral"}}]}
        ]
        async with client.messages.stream(
            model="policy", system="sys", messages=messages, tools=ANTHROPIC_TOOLS, max_tokens=50
        ) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        text, tool = first.content
        assert text.type == "text" and text.text == "Looking."
        assert tool.type == "tool_use" and tool.input == {"command": "ls -a", "n": 3}
        messages[0] = {"role": "user", "content": "fix"}  # the same message in another form
        messages += [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
        messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": tool.id, "content": "a.py"}]}]
        count = await client.messages.count_tokens(
            model="policy", system="sys", messages=messages, tools=ANTHROPIC_TOOLS
        )
        second = await client.messages.create(
            model="policy", system="sys", messages=messages, tools=ANTHROPIC_TOOLS, max_tokens=50
        )
    assert second.stop_reason == "end_turn" and second.content[0].text == "Done."  # type: ignore[union-attr]
    turns = await opened.wait_delivered(2)
    assert [turn.fork_cause for turn in turns] == ["root", None]
    assert count.input_tokens == second.usage.input_tokens == len((await engine.seen())["calls"][1]["ids"])


def _without_repeated_pieces(kinds: list[str]) -> list[str]:
    """Return the events with one delta per block: a block comes in as many pieces as there were looks at it."""
    found: list[str] = []
    for kind in kinds:
        found.append(kind)
        if len(found) >= 4 and found[-4:-2] == found[-2:] and found[-2] == "content_block_delta":
            del found[-2:]
    return found


async def test_a_messages_stream_has_every_event_that_the_sdk_builds_from(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Thinking, text and a tool's input are started, filled and stopped in turn; a failure in the stream is an
    exception.
    """
    await engine.say(THOUGHT + "Looking.\n" + CALL, "Done.")
    await engine.script({"status": 400})
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with anthropic_client(thinking, opened.token) as client:

        def ask() -> Any:
            options: Any = {"type": "enabled", "budget_tokens": 1024}
            return client.messages.stream(
                model="policy", messages=messages, tools=ANTHROPIC_TOOLS, max_tokens=2000, thinking=options
            )

        async with ask() as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_message()
        block = ["content_block_start", "content_block_delta"]
        assert _without_repeated_pieces(kinds) == [
            *["message_start", *block, "thinking", "content_block_delta", "signature", "content_block_stop"],
            *[
                *block,
                "text",
                "content_block_stop",
                *block,
                "input_json",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ],
        ]
        assert [one.type for one in first.content] == ["thinking", "text", "tool_use"] and first.content[
            0
        ].thinking == "first look"
        assert first.content[2].input == {"command": "ls -a", "n": 3} and first.stop_reason == "tool_use"
        messages += [{"role": "assistant", "content": [one.model_dump() for one in first.content]}]
        messages += [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": first.content[2].id, "content": "a.py"}],
            }
        ]
        async with ask() as stream:
            second = await stream.get_final_message()
        messages.append({"role": "user", "content": "more"})
        with pytest.raises(anthropic.APIStatusError, match="refused"):
            async with ask() as stream:
                await stream.get_final_message()
    turns = [turn for turn in await opened.wait_delivered(2) if turn.state == "completed"]
    assert [turn.fork_cause for turn in turns] == ["root", None]
    assert [(one.usage.input_tokens, one.usage.output_tokens) for one in (first, second)] == [
        (turn.prompt_tokens, turn.num_sampled) for turn in turns
    ]


@pytest.mark.parametrize(
    "output", [CALL.replace("ls -a", "x")[:60], CALL.replace("bash", "unknown"), "<tool_call>\nnonsense\n</tool_call>"]
)
async def test_a_malformed_tool_call_is_plain_text(
    with_tools: str, engine: ScriptedEngine, opened: Opened, output: str
) -> None:
    await engine.say(output, "ok")
    async with chat_client(with_tools, opened.token) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        reply = (await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)).choices[0]
        assert reply.message.content == output and not reply.message.tool_calls and reply.finish_reason == "stop"
        messages += [{"role": "assistant", "content": output}, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
    assert [turn.fork_cause for turn in await opened.wait_delivered(2)] == ["root", None]


async def test_an_unknown_token_gets_the_vendors_error(adapter: str, engine: ScriptedEngine) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    async with chat_client(adapter, "wrong") as chat, anthropic_client(adapter, "wrong") as claude:
        with pytest.raises(openai.AuthenticationError, match="unknown"):
            await chat.chat.completions.create(model="policy", messages=messages)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await claude.messages.create(model="policy", messages=messages, max_tokens=5)
    assert (await engine.seen())["calls"] == []


async def test_a_full_context_is_the_vendors_error_and_no_turn(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    opened = await open_rollout(database, max_context_tokens=40)
    messages: Any = [{"role": "user", "content": "word " * 40}]
    async with chat_client(adapter, opened.token) as chat, anthropic_client(adapter, opened.token) as claude:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.chat.completions.create(model="policy", messages=messages, stream=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await claude.messages.create(model="policy", messages=messages, max_tokens=5)
        reply = await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    assert reply.choices[0].finish_reason == "length"
    turns = await opened.wait_delivered(1)
    assert len(turns) == 1
    call = (await engine.seen())["calls"][0]
    assert call["sampling"]["max_tokens"] == 40 - len(call["ids"])


async def test_bad_requests_are_400_and_the_session_stays_usable(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    headers = {"authorization": f"Bearer {opened.token}"}
    async with httpx.AsyncClient(base_url=adapter, headers=headers, timeout=60) as http:
        for path in ("/v1/chat/completions", "/v1/messages"):
            for body in (
                b"",
                b"[]",
                b"{",
                b'{"messages": []}',
                b'{"messages": 3}',
                b'{"messages": [{"role": "x"}]}',
                b'{"messages": [1]}',
            ):
                reply = await http.post(path, content=body)
                assert reply.status_code == 400 and reply.json()["error"]["message"], (path, body)
        late_system = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
        assert (await http.post("/v1/messages", json={"messages": late_system, "max_tokens": 5})).status_code == 200
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "policy"
