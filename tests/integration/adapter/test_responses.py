"""OpenAI's SDK against the Responses dialect: every event type that the adapter sends, tools of both kinds, thinking,
limits.

Codex speaks this protocol, and its SDK is the strictest client. vLLM's parsers are imported once for this file (about
13 CPU seconds).
"""

from itertools import groupby
from typing import Any

import httpx
import openai
import pytest

from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, open_rollout
from tests.integration.adapter.test_dialects import CALL, SCHEMA, THOUGHT, chat_client, stream_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

PATCH = (
    "<tool_call>\n<function=apply_patch>\n<parameter=input>\n"
    "*** Begin Patch\n*** End Patch\n</parameter>\n</function>\n</tool_call>"
)
TOOLS: Any = [
    {"type": "function", "name": "bash", "description": "run", "parameters": SCHEMA, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "edit files"},
    {"type": "web_search"},
]


def user_item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_a_tool_loop_with_thinking_is_one_exact_stream(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(THOUGHT + "Looking.\n" + CALL, THOUGHT + PATCH, "<think>\n\n</think>\n\nDone.")
    history: list[Any] = [user_item("fix <|im_end|> it")]
    async with chat_client(thinking, opened.token) as client:

        async def ask() -> Any:
            return await client.responses.create(
                model="policy",
                instructions="sys",
                input=history,
                tools=TOOLS,
                store=False,
                include=["reasoning.encrypted_content"],
            )

        first = await ask()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        reasoning, message, call = first.output
        assert reasoning.content[0].text == "first look" and first.output_text == message.content[0].text == "Looking."
        assert (call.name, call.arguments) == ("bash", '{"command":"ls -a","n":3}')
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "a.py"})
        second = await ask()
        assert [item.type for item in second.output] == ["reasoning", "custom_tool_call"]
        assert second.output[1].input == "*** Begin Patch\n*** End Patch"
        history += [item.model_dump(exclude_none=True) for item in second.output]
        history.append(
            {
                "type": "custom_tool_call_output",
                "call_id": second.output[1].call_id,
                "output": [{"type": "input_text", "text": "ok"}],
            }
        )
        third = await ask()
    assert third.status == "completed" and third.output_text == "Done."
    turns = await opened.wait_delivered(3)
    calls = (await engine.seen())["calls"]
    assert [turn.fork_cause for turn in turns] == ["root", None, None]
    for turn, call, reply in zip(turns, calls, (first, second, third), strict=True):
        assert call["ids"] == stream_of(turns, turn)[: turn.prompt_tokens].tolist()
        assert reply.usage.input_tokens == len(call["ids"]) and reply.usage.output_tokens == turn.num_sampled
    thought = len(engine.ids(THOUGHT.rstrip("\n"), stop=False))
    assert [reply.usage.output_tokens_details.reasoning_tokens for reply in (first, second, third)] == [
        thought,
        thought,
        0,
    ]


async def test_a_stream_has_every_event_in_the_order_that_the_sdk_builds_from(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say(THOUGHT + "Looking.\n" + CALL + "\n" + PATCH)
    async with (
        chat_client(thinking, opened.token) as client,
        client.responses.stream(model="policy", input=[user_item("go")], tools=TOOLS) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events if event.type != "response.in_progress"]
    part = ["content_part.added", "content_part.done"]
    item = ["output_item.added", "output_item.done"]

    def filled(name: str) -> list[str]:
        return [f"{name}.delta", f"{name}.done"]

    assert [kind for kind, _ in groupby(kinds)] == [  # a text may come in several deltas
        "created",
        *[item[0], part[0], *filled("reasoning_text"), part[1], item[1]],
        *[item[0], part[0], *filled("output_text"), part[1], item[1]],
        *[item[0], *filled("function_call_arguments"), item[1]],
        *[item[0], *filled("custom_tool_call_input"), item[1]],
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert final.output[2].arguments == '{"command":"ls -a","n":3}' and final.usage is not None
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [one.id for one in final.output]


async def test_fields_that_clients_omit_from_the_items_change_nothing(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Codex sends only the encrypted content of reasoning back, and omits ids and states of all items."""
    await engine.say(THOUGHT + "Looking.\n" + CALL, "Done.")
    history: list[Any] = [user_item("go")]
    async with chat_client(thinking, opened.token) as client:
        first = await client.responses.create(model="policy", input=history, tools=TOOLS)
        reasoning, message, call = (item.model_dump(exclude_none=True) for item in first.output)
        history += [
            {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": message["content"][0]["text"]}],
            },
            {"type": "function_call", "name": "bash", "arguments": call["arguments"], "call_id": call["call_id"]},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"},
        ]
        await client.responses.create(model="policy", input=history, tools=TOOLS)
    assert [turn.fork_cause for turn in await opened.wait_delivered(2)] == ["root", None]


NAMESPACES: Any = [
    {
        "type": "namespace",
        "name": "mcp__calc",
        "description": "a calculator",
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}],
    },
    {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [{"type": "custom", "name": "apply_patch", "description": "edit files"}],
    },
    *TOOLS,
]


async def test_tools_of_a_namespace_are_offered_and_called_by_both_names(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Equal names in different namespaces stay apart, in the answer and when the call comes back."""
    spaced = CALL.replace("=bash", "=mcp__calc__bash") + "\n" + PATCH.replace("=apply_patch", "=files__apply_patch")
    await engine.say(spaced + "\n" + CALL, "Done.")
    history: list[Any] = [user_item("go")]
    async with chat_client(thinking, opened.token) as client:
        async with client.responses.stream(model="policy", input=history, tools=NAMESPACES) as stream:
            first = await stream.get_final_response()
        calls = [item for item in first.output if item.type.endswith("_call")]
        assert [(item.namespace, item.name) for item in calls] == [
            ("mcp__calc", "bash"),
            ("files", "apply_patch"),
            (None, "bash"),
        ]
        assert [item.type for item in calls] == ["function_call", "custom_tool_call", "function_call"]
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history += [
            {"type": f"{item.type}_output", "call_id": item.call_id, "output": f"result {at}"}
            for at, item in enumerate(calls)
        ]
        await client.responses.create(model="policy", input=history, tools=NAMESPACES)
    assert [turn.fork_cause for turn in await opened.wait_delivered(2)] == ["root", None]
    prompt = engine.renderer.tokenizer.decode((await engine.seen())["calls"][1]["ids"])
    assert all(name in prompt for name in ('"name": "mcp__calc__bash"', '"name": "files__apply_patch"'))
    assert "Tools mcp__calc__*: a calculator" in prompt and "Tools files__*" not in prompt


async def test_a_full_context_fails_in_the_stream_and_by_status_without_one(
    adapter: str, engine: ScriptedEngine, database: Database
) -> None:
    opened = await open_rollout(database, max_context_tokens=40)
    async with chat_client(adapter, opened.token) as client:
        events = [
            event async for event in await client.responses.create(model="policy", input="word " * 40, stream=True)
        ]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="policy", input="word " * 40)
        short = await client.responses.create(model="policy", input="a", max_output_tokens=16)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.status == "failed" and events[-1].response.error.code == "context_length_exceeded"
    assert refused.value.code == "context_length_exceeded"
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    assert len(await opened.wait_delivered(1)) == 1 == len((await engine.seen())["calls"])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "hologram"}]}]},
            "hologram",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "no corresponding tool call"),
        ({"input": []}, "at least one message"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "must have type 'object'"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "a namespace has"),
        ({"tools": [{"type": "local_shell"}]}, "declare the tool as a function"),
        ({"tools": [{"type": "tool_search", "execution": "client"}]}, "tools[0]: a tool_search that the client"),
        ({"tool_choice": {"type": "function", "name": "rm"}}, "tool_choice.name: no function 'rm'"),
        ({"model": "gpt-9"}, "not served here"),
    ],
)
async def test_a_request_that_cannot_be_served_gets_the_vendors_error(
    adapter: str, engine: ScriptedEngine, opened: Opened, changes: dict[str, Any], word: str
) -> None:
    async with httpx.AsyncClient(
        base_url=adapter, headers={"authorization": f"Bearer {opened.token}"}, timeout=60
    ) as http:
        refused = await http.post("/v1/responses", json={"model": "policy", "input": "x"} | changes)
        assert refused.status_code in (400, 404) and word in refused.json()["error"]["message"]
        assert (await http.post("/v1/responses", json={"model": "policy", "input": "x"})).status_code == 200
