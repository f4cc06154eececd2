"""The tool runner of Anthropic's SDK (`beta.messages.tool_runner`), an agent loop that runs the client's functions.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from pydantic import BaseModel

from tests.integration.adapter.conftest import Opened, ScriptedEngine
from tests.integration.adapter.test_dialects import CALL, THOUGHT, anthropic_client

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
ASK: Any = [{"role": "user", "content": "go"}]
DONE = THOUGHT + "Done."


class Found(BaseModel):
    path: str


class Ran(list[str]):
    """The commands that the tool `bash` has run."""

    def tool(self) -> Any:
        @beta_async_tool
        async def bash(command: str, n: int = 0) -> str:
            """Run a command."""
            self.append(command)
            if command == "fail":
                raise RuntimeError("no such file")
            return f"result of {command}"

        return bash


def call(command: str) -> str:
    return CALL.replace("ls -a", command)


def runner(client: anthropic.AsyncAnthropic, ran: Ran, **options: Any) -> Any:
    return client.beta.messages.tool_runner(model="policy", max_tokens=90, messages=ASK, tools=[ran.tool()], **options)


async def last_prompt(engine: ScriptedEngine) -> str:
    return str(engine.renderer.tokenizer.decode((await engine.seen())["calls"][-1]["ids"]))


@pytest.mark.parametrize("options", [{}, {"thread": False}], ids=["threads", "no threads"])
async def test_a_loop_is_one_stream(
    thinking: str, engine: ScriptedEngine, opened: Opened, options: dict[str, Any]
) -> None:
    """It asks for a conversation that the server keeps, and sends the whole history itself after the refusal. Parallel
    calls are all run; a tool that raises has a result that says so.
    """
    ran = Ran()
    await engine.say(f"{THOUGHT}{call('ls')}\n{call('fail')}", THOUGHT + call("pwd"), DONE)
    async with anthropic_client(thinking, opened.token) as client:
        last = await runner(client, ran, **options).until_done()
    assert ran == ["ls", "fail", "pwd"] and last.content[-1].text == "Done."
    assert [row.fork_cause for row in await opened.wait_delivered(3)] == ["root", None, None]
    prompt = await last_prompt(engine)
    assert all(one in prompt for one in ("result of ls", "no such file", "result of pwd"))


@pytest.mark.parametrize("eagerly", [True, False])
async def test_a_streamed_loop_runs_each_call_once(
    thinking: str, engine: ScriptedEngine, opened: Opened, eagerly: bool
) -> None:
    """Also if it runs calls while the answer is streamed: a call ends in the stream only after the turn is stored."""
    ran = Ran()
    await engine.say(f"{THOUGHT}{call('ls')}\n{call('pwd')}", DONE)
    async with anthropic_client(thinking, opened.token) as client:
        texts = []
        async for stream in runner(client, ran, stream=True, run_tools_eagerly=eagerly):
            message = await stream.get_final_message()
            texts.append(message.content[-1].type)
    assert ran == ["ls", "pwd"] and texts == ["tool_use", "text"]
    assert [row.fork_cause for row in await opened.wait_delivered(2)] == ["root", None]


async def test_a_loop_ends_with_a_structured_answer(thinking: str, engine: ScriptedEngine, opened: Opened) -> None:
    ran = Ran()
    await engine.say(THOUGHT + call("ls"), THOUGHT + '{"path": "a.py"}')
    async with anthropic_client(thinking, opened.token) as client:
        last = await runner(client, ran, output_format=Found).until_done()
    assert ran == ["ls"] and last.parsed_output == Found(path="a.py")


EDIT = {"type": "clear_tool_uses_20250919"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"container": "c_1"}, "container: there are no containers"),
    ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "s"}]}, "mcp_servers: connect the agent itself"),
    ({"context_management": {"edits": [EDIT, {"type": "compact_20260112"}]}}, "context_management.edits.1: "),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
async def test_what_the_vendors_servers_would_do_is_refused_by_name(
    adapter: str, engine: ScriptedEngine, opened: Opened, options: dict[str, Any], words: str
) -> None:
    """No detail of the error says that it would work without a thread."""
    async with anthropic_client(adapter, opened.token) as client:
        with pytest.raises(anthropic.BadRequestError, match=words) as refused:
            await runner(client, Ran(), thread=False, **options).until_done()
    assert isinstance(refused.value.body, dict) and "details" not in refused.value.body["error"]
    assert await opened.turns() == []


async def test_its_compaction_and_its_changes_of_tools_are_refused_by_name(
    thinking: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Other edits than a compaction are accepted; none is applied."""
    for change, words in (("compact", "compaction: the history is not compacted here"), ("tools", "tool_addition")):
        ran = Ran()
        await engine.say(THOUGHT + call("ls"))
        async with anthropic_client(thinking, opened.token) as client:
            loop = runner(client, ran, context_management={"edits": [EDIT]} if change == "tools" else anthropic.omit)
            with pytest.raises(anthropic.BadRequestError, match=words):
                async for _ in loop:
                    if change == "compact":
                        loop.compact_before_next_turn()
                    else:
                        loop.add_tools({"name": "more", "input_schema": {"type": "object"}})
        assert ran == ["ls"]
