"""Agents that send no reasoning back, as langchain and others over Chat: one chain, as with those that do.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

from pathlib import Path
from typing import Any

import pytest

from adapter.turns.loss_mask import TokenChain, build_chains
from ratchet.store import turns
from ratchet.store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, THOUGHT, chat_client
from tests.standins.tiny_model import make_tokenizer
from tests.unit.adapter.prompt.test_prompt_builder import KEEPING

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


@pytest.fixture(scope="module")
def keeping_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keeping")
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(KEEPING)
    return directory


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
