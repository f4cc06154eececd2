"""An adapter that passes its calls on to an endpoint: the endpoint is a second adapter, with a scripted engine.

So the endpoint is a real server of Chat Completions that streams, and agents of all three protocols use it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select, update

from adapter.turns.loss_mask import build_chains
from ratchet.config_sections import EndpointConfig
from stack.ports import free_port
from store import session_notes, sessions, turns
from store.arrays import unpack_json
from store.database import Database
from store.schema import SessionTable
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import (
    ANTHROPIC_TOOLS,
    CALL,
    CHAT_TOOLS,
    SCHEMA,
    anthropic_client,
    chat_client,
)
from tests.standins.chat_engine import ChatEngine, refuses, says

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)


async def forward_to(database: Database, opened: Opened, url: str, key: str | None = None) -> None:
    config = EndpointConfig(url=url, model="policy", key=key)
    statement = update(SessionTable).where(SessionTable.id == opened.session_id)
    async with database.begin() as conn:
        await conn.execute(statement.values(endpoint=config.model_dump(mode="json")))


@pytest.fixture
async def forwarded(
    database: Database, engine: ScriptedEngine, postgres_url: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, Opened, Opened]]:
    """The adapter's address, the session of the agent, and that of the endpoint."""
    agent, there = await open_rollout(database), await open_rollout(database, member=1)
    async with adapter_here(adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder")) as address:
        monkeypatch.setenv("ENDPOINT_KEY", there.token)
        await forward_to(database, agent, f"{address}/v1", "${ENDPOINT_KEY}")
        yield address, agent, there


async def test_agents_of_all_protocols_work_with_an_endpoint(
    forwarded: tuple[str, Opened, Opened], engine: ScriptedEngine
) -> None:
    address, agent, there = forwarded
    asked: list[Any] = [{"role": "user", "content": "fix it"}]
    await engine.say("Looking.\n" + CALL, "Done.", "Looking.\n" + CALL, "Looking.\n" + CALL)
    async with chat_client(address, agent.token) as client:
        first = await client.chat.completions.create(model="policy", messages=asked, tools=CHAT_TOOLS, max_tokens=50)
        message = first.choices[0].message
        assert message.tool_calls and first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls[0].function.arguments == '{"command":"ls -a","n":3}'  # type: ignore[union-attr]
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"}
        history = [*asked, message.model_dump(), result]
        stream = await client.chat.completions.create(
            model="policy", messages=history, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Done."
    async with (
        anthropic_client(address, agent.token) as claude,
        claude.messages.stream(
            model="policy", system="sys", messages=asked, tools=ANTHROPIC_TOOLS, max_tokens=50
        ) as events,
    ):
        answered = await events.get_final_message()
    assert answered.stop_reason == "tool_use" and answered.usage.input_tokens > 0
    async with chat_client(address, agent.token) as client:
        tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
        response = await client.responses.create(model="policy", input="fix it", tools=tools, store=False)
    assert any(item.type == "function_call" for item in response.output)

    rows = await agent.wait_delivered(4)
    assert {row.state for row in rows} == {"completed"} and {row.engine_id for row in rows} == {None}
    assert all(not row.sampled_ids and not row.suffix_ids and not row.logprobs_valid for row in rows)
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens == (await there.turns())[1].prompt_tokens
    stored: Any = unpack_json(rows[1].answer)
    assert stored["completion_tokens"] == (await there.turns())[1].num_sampled, "the endpoint's own counts are kept"


async def test_nothing_of_an_endpoint_can_be_trained(
    forwarded: tuple[str, Opened, Opened], engine: ScriptedEngine, database: Database
) -> None:
    address, agent, there = forwarded
    await engine.say("yes")
    async with chat_client(address, agent.token) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    await agent.wait_delivered(1)
    await there.wait_delivered(1)
    async with database.begin() as conn:
        of_endpoint = build_chains(await turns.load_metas(conn, agent.rollout_id, 1))
        of_policy = build_chains(await turns.load_metas(conn, there.rollout_id, 1))
    assert sum(chain.num_trained for chain in of_policy) > 0, "the same answer of a policy is trained"
    assert sum(chain.num_trained for chain in of_endpoint) == 0
    assert sum(chain.num_tokens for chain in of_endpoint) == 0


async def endpoint_error(database: Database, opened: Opened) -> str | None:
    async with database.begin() as conn:
        found: str | None = await conn.scalar(
            select(SessionTable.endpoint_error).where(SessionTable.id == opened.session_id)
        )
    return found


async def until_noted(database: Database, opened: Opened, noted: bool) -> str:
    async with asyncio.timeout(120):
        while bool(found := await endpoint_error(database, opened)) != noted:
            await asyncio.sleep(0.05)
    return found or ""


async def test_a_call_waits_while_the_endpoint_is_busy_or_away(adapter: str, database: Database) -> None:
    """It is away, refuses, fails, and answers at last: the agent sees one slow call, whose wait is not its own time."""
    opened = await open_rollout(database)
    port = free_port()
    await forward_to(database, opened, f"http://127.0.0.1:{port}/v1")
    async with chat_client(adapter, opened.token) as client:
        asking = asyncio.create_task(
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        )
        assert "ConnectError" in await until_noted(database, opened, True)
        async with database.begin() as conn:
            waiting = await session_notes.endpoint_errors(conn, "run-1")
        assert waiting is not None and waiting.num_waiting == 1 and str(port) in waiting.reason
        with ChatEngine([refuses(429), refuses(503), says("at last")], port) as server:
            answer = await asking
        assert len(server.requests) == 3
    assert answer.choices[0].message.content == "at last"
    await until_noted(database, opened, False)
    (row,) = await opened.wait_delivered(1)
    assert row.engine_wait_seconds > 0
    async with database.begin() as conn:
        progress = (await sessions.read_progress(conn, [(opened.rollout_id, 1)]))[opened.rollout_id, 1]
    assert progress.waited_seconds > 0


async def test_a_full_context_and_a_refused_request_reach_the_agent(adapter: str, database: Database) -> None:
    told = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    full = (400, {"error": {"message": told}})
    for number, (answer, said) in enumerate(
        [
            (full, "prompt is too long: 5000 tokens > 4096 maximum"),
            (refuses(422), "the endpoint refused the request: .* 422"),
        ]
    ):
        opened = await open_rollout(database, member=number)
        with ChatEngine([says("I begin."), answer]) as server:
            await forward_to(database, opened, f"http://127.0.0.1:{server.port}/v1")
            messages: list[Any] = [{"role": "user", "content": "x"}]
            async with chat_client(adapter, opened.token) as client:
                begun = await client.chat.completions.create(model="policy", messages=messages)
                messages += [begun.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "y"}]
                with pytest.raises(openai.BadRequestError, match=said):
                    await client.chat.completions.create(model="policy", messages=messages, timeout=30)
        assert (await opened.turns())[-1].state == "aborted"


async def test_a_form_that_an_endpoint_refuses_before_the_first_answer_is_for_a_person(
    adapter: str, database: Database
) -> None:
    """The policy has had no part in it, so it is no zero: the call waits until the endpoint takes it."""
    opened = await open_rollout(database)
    with ChatEngine([refuses(400), says("mended")]) as server:
        await forward_to(database, opened, f"http://127.0.0.1:{server.port}/v1")
        async with chat_client(adapter, opened.token) as client:
            reply = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x"}], timeout=60
            )
    assert reply.choices[0].message.content == "mended"


async def test_logprobs_are_the_endpoints_or_refused(
    forwarded: tuple[str, Opened, Opened], adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    """This adapter as the endpoint returns them; another server does not, and is asked only once."""
    address, agent, _ = forwarded
    ids = engine.ids("one two")
    await engine.script({"ids": ids, "logprobs": [-0.5] * len(ids)})
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    async with chat_client(address, agent.token) as client:
        answer = await client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [one.logprob for one in content or []] == [-0.5] * len(ids)
    other = await open_rollout(database, member=2)
    with ChatEngine([says("no logprobs")]) as server:
        await forward_to(database, other, f"http://127.0.0.1:{server.port}/v1")
        async with chat_client(adapter, other.token) as client:
            for _ in range(2):
                with pytest.raises(
                    openai.BadRequestError, match="logprobs: the endpoint of this evaluation returns none"
                ):
                    await client.chat.completions.create(**asked)
        assert [request.body["logprobs"] for request in server.requests] == [True]
    assert {row.state for row in await other.turns()} == {"aborted"}


async def test_another_process_continues_a_conversation_with_an_endpoint(
    postgres_url: str, model_dir: Path, database: Database
) -> None:
    """The history is read from the store; the repetition of a call that was answered gets the stored answer."""
    opened = await open_rollout(database)
    with ChatEngine([says("one"), says("two")]) as server:
        await forward_to(database, opened, f"http://127.0.0.1:{server.port}/v1")
        history: list[Any] = [{"role": "user", "content": "x"}]
        async with contextlib.AsyncExitStack() as stack:
            for expected in ("one", "two"):
                address = await stack.enter_async_context(adapter_here(adapter_settings(postgres_url, model_dir)))
                client = await stack.enter_async_context(chat_client(address, opened.token))
                answer = await client.chat.completions.create(model="policy", messages=history)
                assert answer.choices[0].message.content == expected
                again = await client.chat.completions.create(
                    model="policy", messages=history, extra_headers={"x-stainless-retry-count": "1"}
                )
                assert again.choices[0].message.content == expected
                history += [{"role": "assistant", "content": expected}, {"role": "user", "content": "go on"}]
        assert [len(request.body["messages"]) for request in server.requests] == [1, 3]
    rows = await opened.turns()
    requests: list[Any] = [unpack_json(row.request) for row in rows]
    assert [one["after"] for one in requests] == [None, rows[0].id]
    assert [len(one["messages"]) for one in requests] == [1, 1], "what was stored with an earlier turn is not repeated"
