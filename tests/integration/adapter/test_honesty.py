"""Nothing is answered as if it were honoured, through the vendors' SDKs: state that is not kept, formats, logprobs,
custom tools, unknown routes.
"""

from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from store.arrays import ids_from_bytes, unpack_json
from tests.integration.adapter.conftest import Opened, ScriptedEngine
from tests.integration.adapter.test_dialects import CALL, SCHEMA, anthropic_client, chat_client

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
ASK: Any = [{"role": "user", "content": "go"}]


class Found(BaseModel):
    path: str


FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
GOOD, BAD = '{"path": "a.py"}', '{"path": 3}'


# ---------------------------------------------------------------- state


STATE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "x", "conversation": {"id": "conv_1"}}),
    ("/v1/responses", {"input": "x", "store": True}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/v1/responses", {"input": "x", "prompt": {"id": "pmpt_1"}}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "rs_1"}]}),
    ("/v1/chat/completions", {"messages": ASK, "store": True}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 5, "thread": {"type": "create"}}),
]


@pytest.mark.parametrize(("path", "body"), STATE, ids=[f"{path} {sorted(body)}" for path, body in STATE])
async def test_state_that_is_not_kept_is_refused(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, body: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=60) as http:
        refused = await http.post(path, json={"model": "policy"} | body)
    assert refused.status_code == 400 and "invalid request" in refused.json()["error"]["message"]
    assert await opened.turns() == []


# ---------------------------------------------------------------- formats


async def test_a_chat_answer_says_if_it_violates_the_format(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(GOOD, BAD, "no JSON", BAD, "on")
    async with chat_client(adapter, opened.token) as client:
        found = [
            (await client.chat.completions.parse(model="policy", messages=ASK, response_format=Found))
            .choices[0]
            .message
            for _ in range(3)
        ]
        assert found[0].parsed == Found(path="a.py") and found[0].refusal is None
        assert found[1].parsed is None and "schema" in (found[1].refusal or "") and found[1].content == BAD
        assert found[2].parsed is None and "not the JSON" in (found[2].refusal or "")
        async with client.chat.completions.stream(model="policy", messages=ASK, response_format=Found) as stream:
            kinds = {event.type async for event in stream}
        assert "refusal.done" in kinds
        sent = found[1].model_dump(exclude_none=True, exclude={"parsed"})
        messages = [*ASK, sent, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="policy", messages=messages)
    assert (await opened.wait_delivered(5))[-1].fork_cause is None


async def test_a_responses_answer_says_if_it_violates_the_format(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(GOOD, BAD, BAD, "on")
    async with chat_client(adapter, opened.token) as client:
        good = await client.responses.parse(model="policy", input="go", text_format=Found)
        assert good.output_parsed == Found(path="a.py")
        text: Any = {"format": {"type": "json_schema", "name": "f", "schema": FORMAT}}
        bad = await client.responses.create(model="policy", input="go", text=text)
        assert [part.type for part in bad.output[0].content] == ["output_text", "refusal"]
        async with client.responses.stream(model="policy", input="go", text=text) as stream:
            kinds = {event.type async for event in stream}
        assert "response.refusal.done" in kinds
        history: Any = [{"role": "user", "content": "go"}, bad.output[0].model_dump(exclude_none=True)]
        await client.responses.create(model="policy", input=[*history, {"role": "user", "content": "again"}])
    assert (await opened.wait_delivered(4))[-1].fork_cause is None


async def test_a_messages_answer_says_if_it_violates_the_format(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(GOOD, BAD, BAD)
    options: Any = {"output_config": {"format": {"type": "json_schema", "schema": FORMAT}}}
    async with anthropic_client(adapter, opened.token) as client:
        replies = [
            await client.messages.create(model="policy", messages=ASK, max_tokens=50, **options) for _ in range(2)
        ]
        async with client.messages.stream(model="policy", messages=ASK, max_tokens=50, **options) as stream:
            replies.append(await stream.get_final_message())
    assert [reply.stop_reason for reply in replies] == ["end_turn", "refusal", "refusal"]
    assert all(reply.content[0].text == BAD for reply in replies[1:])  # type: ignore[union-attr]


async def test_an_answer_that_its_limit_cut_is_no_refusal(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    for _ in range(3):
        await engine.script({"ids": engine.ids('{"path": "a', stop=False)})
    schema: Any = {"type": "json_schema", "schema": FORMAT}
    named: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORMAT}}
    async with anthropic_client(adapter, opened.token) as claude, chat_client(adapter, opened.token) as client:
        message = await claude.messages.create(
            model="policy", messages=ASK, max_tokens=50, output_config={"format": schema}
        )
        chat = await client.chat.completions.create(model="policy", messages=ASK, response_format=named)
        text: Any = {"format": schema | {"name": "f"}}
        response = await client.responses.create(model="policy", input="go", text=text)
    assert message.stop_reason == "max_tokens"
    assert chat.choices[0].finish_reason == "length"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    for said in (chat.choices[0].message.refusal, response.output[0].content[1].refusal):  # type: ignore[union-attr]
        assert said.startswith("the answer was cut at its limit of tokens")  # type: ignore[union-attr]
    stored: Any = unpack_json((await opened.turns())[0].answer)
    assert stored["violation"].startswith("the answer was cut at its limit of tokens")


async def test_a_format_fetches_nothing_and_may_refer_to_itself(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(GOOD, "{}")
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    itself = {"type": "object", "properties": {"inner": {"$ref": "#"}}}
    async with chat_client(adapter, opened.token) as client:
        for schema, violates in ((elsewhere, True), (itself, False)):
            options: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}
            reply = await client.chat.completions.create(model="policy", messages=ASK, **options)
            assert bool(reply.choices[0].message.refusal) is violates


# ---------------------------------------------------------------- logprobs


async def test_logprobs_are_those_of_the_engine(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    ids = engine.ids("one two é")
    values = [-0.5 - at / 8 for at in range(len(ids))]
    for _ in range(3):
        await engine.script({"ids": ids, "logprobs": values})
    decode = engine.renderer.tokenizer.decode
    async with chat_client(adapter, opened.token) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK, logprobs=True)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(one.token, one.logprob) for one in logprobs.content] == [
            (decode([one]), value) for one, value in zip(ids, values, strict=True)
        ]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="policy", messages=ASK, logprobs=True, stream=True
            )
        ]
        streamed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content or ()]
        assert [one.logprob for one in streamed] == values
        answer = await client.responses.create(model="policy", input="go", include=["message.output_text.logprobs"])
        assert [one.logprob for one in answer.output[0].content[0].logprobs] == values  # type: ignore[union-attr]
        plain = await client.chat.completions.create(model="policy", messages=ASK)
        assert plain.choices[0].logprobs is None
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await client.chat.completions.create(model="policy", messages=ASK, logprobs=True, top_logprobs=3)
    assert ids_from_bytes((await opened.wait_delivered(4))[0].sampled_ids).tolist() == ids


# ---------------------------------------------------------------- tools and routes


async def test_custom_tools_over_chat(thinking: str, engine: ScriptedEngine, opened: Opened) -> None:
    patch = CALL.replace("=bash", "=edit").replace("=command", "=input").replace("<parameter=n>\n3\n</parameter>\n", "")
    await engine.say(patch, "Done.")
    tools: Any = [
        {"type": "custom", "custom": {"name": "edit", "description": "edit files"}},
        {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}},
    ]
    async with chat_client(thinking, opened.token) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK, tools=tools)
        (call,) = reply.choices[0].message.tool_calls or ()
        assert call.type == "custom" and (call.custom.name, call.custom.input) == ("edit", "ls -a")
        sent: Any = reply.choices[0].message.model_dump(exclude_none=True)
        messages = [*ASK, sent, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=tools)
    assert [row.fork_cause for row in await opened.wait_delivered(2)] == ["root", None]


@pytest.mark.parametrize(
    "body",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"web_search_options": {}},
        {"modalities": ["text", "audio"]},
        {"n": 2},
        {"messages": [*ASK, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, *ASK]},
        {"brand_new_field": 1},
    ],
)
async def test_what_cannot_be_served_is_named(
    adapter: str, engine: ScriptedEngine, opened: Opened, body: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=60) as http:
        reply = await http.post("/v1/chat/completions", json={"messages": ASK} | body)
    assert reply.status_code == 400 and "invalid request" in reply.json()["error"]["message"]


async def test_models_and_counts(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    async with chat_client(adapter, opened.token) as chat, anthropic_client(adapter, opened.token) as claude:
        assert (await chat.models.retrieve("policy")).id == "policy"
        assert (await claude.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="not served"):
            await chat.models.retrieve("gpt-9")
        counted = await chat.responses.input_tokens.count(model="policy", input="go")
        reply = await chat.responses.create(model="policy", input="go")
    assert reply.usage is not None and counted.input_tokens == reply.usage.input_tokens


async def test_an_unknown_route_is_refused_in_the_vendors_form(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    async with chat_client(adapter, opened.token) as chat, anthropic_client(adapter, opened.token) as claude:
        for call in (chat.responses.retrieve("resp_1"), chat.embeddings.create(model="policy", input="x")):
            with pytest.raises(openai.NotFoundError, match="unknown route"):
                await call
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await claude.messages.batches.list()
