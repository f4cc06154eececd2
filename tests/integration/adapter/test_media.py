"""Images through the vendors' SDKs: the model reads a placeholder, the conversation stays one stream, or the run
refuses them.
"""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from activities.harnesses.cli_exits import exit_of_error
from ratchet.types import AgentExit
from store.arrays import unpack_json
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings
from tests.integration.adapter.test_dialects import (
    ANTHROPIC_TOOLS,
    CALL,
    CHAT_TOOLS,
    SCHEMA,
    anthropic_client,
    chat_client,
)
from tests.unit.adapter.dialects.test_media import SEEN, SOURCE, URL

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)


async def through_messages(address: str, opened: Opened) -> None:
    messages: list[Any] = [{"role": "user", "content": "look at it"}]
    async with anthropic_client(address, opened.token) as client:
        for _ in range(2):
            reply = await client.messages.create(
                model="policy", messages=messages, tools=ANTHROPIC_TOOLS, max_tokens=90
            )
            content = [block.model_dump() for block in reply.content]
            result = {"type": "tool_result", "tool_use_id": content[-1].get("id"), "content": [image("messages")]}
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


async def through_chat(address: str, opened: Opened) -> None:
    messages: list[Any] = [{"role": "user", "content": "look at it"}]
    async with chat_client(address, opened.token) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            call_id = message.tool_calls[0].id if message.tool_calls else ""
            messages.append({"role": "tool", "tool_call_id": call_id, "content": [image("chat")]})


async def through_responses(address: str, opened: Opened) -> None:
    history: list[Any] = [{"role": "user", "content": "look at it"}]
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA}]
    async with chat_client(address, opened.token) as client:
        for _ in range(2):
            reply = await client.responses.create(model="policy", input=history, tools=tools)
            history += [item.model_dump(exclude_none=True) for item in reply.output]
            call_id = history[-1].get("call_id", "")
            history.append({"type": "function_call_output", "call_id": call_id, "output": [image("responses")]})


def image(dialect: str) -> dict[str, Any]:
    match dialect:
        case "messages":
            return {"type": "image", "source": SOURCE}
        case "chat":
            return {"type": "image_url", "image_url": {"url": URL}}
    return {"type": "input_image", "image_url": URL}


ASK = {"messages": through_messages, "chat": through_chat, "responses": through_responses}


@pytest.mark.parametrize("dialect", list(ASK))
async def test_an_image_is_a_placeholder_in_one_stream(
    thinking: str, engine: ScriptedEngine, opened: Opened, dialect: str
) -> None:
    await engine.say(CALL, "Seen.")
    await ASK[dialect](thinking, opened)
    rows = await opened.wait_delivered(2)
    assert [row.fork_cause for row in rows] == ["root", None]
    call = (await engine.seen())["calls"][1]
    assert SEEN in engine.renderer.tokenizer.decode(call["ids"])
    stored = [unpack_json(row.request) for row in rows]
    assert [one.get("omitted_media") for one in stored] == [None, 1]


@pytest.mark.parametrize("dialect", list(ASK))
async def test_a_run_may_refuse_images(
    postgres_url: str, model_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened, dialect: str
) -> None:
    """The refusal is no starvation, and the session goes on without the image."""
    settings = adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder", images="refuse")
    await engine.say(CALL)
    async with adapter_here(settings) as address:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="refuses images") as refused:
            await ASK[dialect](address, opened)
    assert exit_of_error(str(refused.value)) is AgentExit.CRASHED
    assert len(await opened.turns()) == 1
