"""Agents that send no reasoning back, as langchain and others over Chat: one chain, as with those that do.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from sqlalchemy import update

from adapter.turns.loss_mask import build_chains
from cli.parts.adapter import SettingsOfSets
from ratchet.config_sources import load_config
from stack.parts import Stack
from stack.ports import free_port
from stack.serving_plan import ServingPlan, write_plan
from store import turns
from store.chains import TokenChain
from store.database import Database
from store.schema import TurnTable
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, THOUGHT, chat_client

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
NUM_TURNS = 8


async def converse(address: str, opened: Opened, sends_reasoning: bool) -> None:
    """A conversation with tool calls, questions and equal answers."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with chat_client(address, opened.token) as client:
        for _ in range(NUM_TURNS):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            sent = reply.choices[0].message.model_dump(exclude_none=True)
            assert sent["reasoning_content"].startswith("first look")
            if not sends_reasoning:
                del sent["reasoning_content"]
            messages.append(sent)
            calls = sent.get("tool_calls", [])
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py"} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": "again"})


async def chains_of(opened: Opened) -> list[TokenChain]:
    async with opened.database.begin() as conn:
        return build_chains(await turns.load_metas(conn, opened.rollout_id, 1))


async def script(engine: ScriptedEngine) -> None:
    for number in range(NUM_TURNS):
        thought = THOUGHT.replace("look", f"look {number}")
        await engine.say(thought + ("Done." if number % 3 == 2 else CALL))


async def test_a_client_that_sends_no_reasoning_has_one_chain(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine
) -> None:
    parsers = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    settings = adapter_settings(postgres_url, keeping_dir, **parsers)
    seen, trained = [], []
    async with adapter_here(settings) as address:
        for sends_reasoning in (True, False):
            opened = await open_rollout(database, int(sends_reasoning), max_context_tokens=5000)
            await script(engine)
            await converse(address, opened, sends_reasoning)
            rows = await opened.wait_delivered(NUM_TURNS)
            assert [row.fork_cause for row in rows] == ["root"] + [None] * (NUM_TURNS - 1)
            (chain,) = await chains_of(opened)
            trained.append((chain.num_tokens, chain.num_trained))
            seen.append([call["ids"] for call in (await engine.seen())["calls"]][-NUM_TURNS:])
    assert seen[0] == seen[1] and trained[0] == trained[1]


async def test_another_process_puts_the_reasoning_back(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    """The last call of a conversation in a process that knows nothing of it."""
    settings = adapter_settings(postgres_url, keeping_dir, tool_parser="qwen3_coder", reasoning_parser="qwen3")
    await engine.say(THOUGHT + CALL, THOUGHT + CALL, "Done.")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(3):
        async with adapter_here(settings) as address, chat_client(address, opened.token) as client:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
        sent = reply.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        calls = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in sent.get("tool_calls", [])]
        messages += [sent, *calls]
    assert [row.fork_cause for row in await opened.wait_delivered(3)] == ["root", None, None]


async def test_without_the_option_the_cause_has_its_own_name(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    parsers = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    settings = adapter_settings(postgres_url, keeping_dir, restore_reasoning=False, **parsers)
    await script(engine)
    async with adapter_here(settings) as address:
        await converse(address, opened, sends_reasoning=False)
    causes = [row.fork_cause for row in await opened.wait_delivered(NUM_TURNS)]
    assert causes == ["root"] + ["reasoning"] * (NUM_TURNS - 1)


@pytest.mark.parametrize("sends_reasoning", [True, False])
@pytest.mark.parametrize("answered", [True, False], ids=["completed", "in flight"])
async def test_a_delivery_that_a_kill_did_not_record_is_proven_by_the_next_call(
    thinking: str, engine: ScriptedEngine, opened: Opened, sends_reasoning: bool, answered: bool
) -> None:
    """The new question makes the template drop the thinking, so the next prompt has not all of the answer's tokens."""
    await engine.say(THOUGHT + "Done.")
    await engine.script({"ids": engine.ids("Again."), **({} if answered else {"hold": "gate"})})
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with chat_client(thinking, opened.token) as client:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        (first,) = await opened.wait_delivered(1)
        async with opened.database.begin() as conn:
            await conn.execute(update(TurnTable).values(delivered=False))
        assert sum(chain.num_trained for chain in await chains_of(opened)) == 0
        sent = reply.choices[0].message.model_dump(exclude_none=True)
        if not sends_reasoning:
            del sent["reasoning_content"]
        messages += [sent, {"role": "user", "content": "again"}]
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
        await (asking if answered else engine.wait_for_calls(2))
        (chain, *_) = await chains_of(opened)
        assert (chain.leaf_turn_id, chain.num_trained) == (first.id, first.num_sampled)
        await engine.release("gate")
        await asking
    assert (await opened.turns())[1].kept_tokens < first.prompt_tokens + first.num_sampled


async def test_a_config_file_sets_images_and_reasoning(
    postgres_url: str, keeping_dir: Path, engine: ScriptedEngine, opened: Opened, tmp_path: Path
) -> None:
    """From the file of a run over the stack's serving plan to an adapter that works so."""
    file = tmp_path / "run.yaml"
    (tmp_path / "tasks.jsonl").touch()
    engine_keys = {"reasoning_parser": "qwen3", "restore_reasoning": False, "images": "refuse"}
    values = {"model": str(keeping_dir), "datasets": [{"path": "tasks.jsonl"}], "engine": engine_keys}
    file.write_text(yaml.safe_dump(values))
    stack = Stack(tmp_path / "stack")
    write_plan(stack, ServingPlan(config=load_config(file), model_path=keeping_dir))
    settings = (
        SettingsOfSets(stack)
        .read()["default"]
        .model_copy(update={"database_url": postgres_url, "host": "127.0.0.1", "port": free_port()})
    )
    await script(engine)
    async with adapter_here(settings) as address:
        await converse(address, opened, sends_reasoning=False)
        image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        async with chat_client(address, opened.token) as client:
            with pytest.raises(openai.BadRequestError, match="refuses images"):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [image]}])
    assert [row.fork_cause for row in await opened.wait_delivered(NUM_TURNS)][1:] == ["reasoning"] * (NUM_TURNS - 1)


async def test_reasoning_is_put_back_into_answers_that_a_client_changed(
    postgres_url: str, keeping_dir: Path, database: Database, engine: ScriptedEngine, opened: Opened
) -> None:
    """It rewrites the text of one answer, and splits the parallel calls of another over two messages; ids stay."""
    settings = adapter_settings(postgres_url, keeping_dir, tool_parser="qwen3_coder", reasoning_parser="qwen3")
    thoughts = [THOUGHT.replace("look", f"look {number}") for number in range(3)]
    await engine.say(f"{thoughts[0]}Looking.\n{CALL}", f"{thoughts[1]}{CALL}\n{CALL}", f"{thoughts[2]}Done.")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with adapter_here(settings) as address, chat_client(address, opened.token) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            for call in reply.choices[0].message.tool_calls or ():
                sent = {"role": "assistant", "content": "rewritten", "tool_calls": [call.model_dump()]}
                messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "a.py"}]
    prompt = engine.renderer.tokenizer.decode((await engine.seen())["calls"][-1]["ids"])
    assert [prompt.count(f"first look {number}") for number in range(3)] == [1, 1, 0]
    assert [row.fork_cause for row in await opened.wait_delivered(3)] == ["root", "edit", "edit"]
