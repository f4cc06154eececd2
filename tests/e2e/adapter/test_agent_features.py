"""Features of agents beside text and shell, with the unmodified programs: images, tools of MCP servers, sub-agents.

Each is an act of the policy; none may end the rollout. A test is skipped if the program cannot be fetched. The table of
`docs/reference/agents.md` is made from the parameters of these tests (`feature_matrix.py`).
"""

from pathlib import Path

import pytest

from ratchet.types import AgentExit
from tests.e2e.adapter.conftest import CODEX, Cli, Testbed, call, each_agent, start
from tests.e2e.adapter.feature_matrix import IMAGES, MCP, SUB_AGENTS, Mcp, SubAgent, ViewImage
from tests.e2e.adapter.test_real_clients import num_trained, read_end

pytestmark = pytest.mark.timeout(3000)
PICTURE = "import sys, zlib, struct\n" + (
    "number = lambda value: struct.pack('>I', value)\n"
    "chunk = lambda kind, data: number(len(data)) + kind + data + number(zlib.crc32(kind + data))\n"
    "pixels = zlib.compress((b'\\0' + b'\\xff\\0\\0' * 31) * 7)\n"
    "head = struct.pack('>IIBBBBB', 31, 7, 8, 2, 0, 0, 0)\n"
    "png = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', head) + chunk(b'IDAT', pixels) + chunk(b'IEND', b'')\n"
    "open('a.png', 'wb').write(png)"
)
MCP_SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    params = asked.get("params") or {}
    if "id" not in asked:
        continue
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    answers = {
        "initialize": {"protocolVersion": params.get("protocolVersion"), "capabilities": {"tools": {}},
                       "serverInfo": {"name": "calc", "version": "1"}},
        "tools/list": {"tools": [{"name": "add", "description": "adds", "inputSchema": numbers}]},
    }
    if asked["method"] == "tools/call":
        total = sum(params["arguments"].values())
        answers["tools/call"] = {"content": [{"type": "text", "text": f"the sum is {total}"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers.get(asked["method"], {})}), flush=True)
"""


async def last_prompt(testbed: Testbed) -> str:
    last = (await testbed.engine.seen())["calls"][-1]["ids"]
    return str(testbed.engine.renderer.tokenizer.decode(last))


async def hold_calls(testbed: Testbed, number: int) -> None:
    """Let the next `number` calls wait, of the main agent and of its sub-agents in any order: a main agent that is
    answered may end before its sub-agents have asked anything.
    """
    ids = testbed.engine.ids("I have looked.")
    await testbed.engine.script(*[{"ids": ids, "hold": "all have asked"}] * number)


async def release_calls(testbed: Testbed, number: int) -> None:
    """End the hold as soon as `number` calls, with those before the hold, have reached the engine."""
    await testbed.wait_for_calls(number)
    await testbed.engine.release("all have asked")


@each_agent(IMAGES)
async def test_an_image_does_not_end_the_rollout(
    cli: Cli, feature: ViewImage, testbed: Testbed, directory: Path
) -> None:
    opened = await testbed.open()
    path = directory / "repo" / "a.png"
    script = f"python3 - <<'PY'\n{PICTURE}\nPY"
    await testbed.engine.say(cli.call(script), call(feature.tool, **{feature.argument: str(path)}), "It is red.")
    running = start(cli, testbed.address, opened.token, directory)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert path.is_file() and read_end(cli, running) is AgentExit.DONE, events[-3:]
    assert feature.seen in await last_prompt(testbed), (await last_prompt(testbed))[-900:]
    assert [row.fork_cause for row in rows] == ["root", None, None]
    assert await num_trained(opened) == [sum(row.num_sampled for row in rows)]


@each_agent(MCP)
async def test_a_tool_of_an_mcp_server_is_called(cli: Cli, feature: Mcp, testbed: Testbed, directory: Path) -> None:
    server = directory / "calc.py"
    server.write_text(MCP_SERVER)
    opened = await testbed.open()
    await testbed.engine.say(call(feature.tool, **feature.arguments), "All done.")
    running = start(cli, testbed.address, opened.token, directory, **feature.configure(server))
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(cli, running) is AgentExit.DONE, events[-3:]
    assert "the sum is 42" in await last_prompt(testbed), events[-3:]
    assert [row.fork_cause for row in rows] == ["root", None]


@each_agent(SUB_AGENTS)
async def test_a_sub_agent_has_a_stream_of_its_own(
    cli: Cli, feature: SubAgent, testbed: Testbed, directory: Path
) -> None:
    """The main conversation stays one stream. A sub-agent has a lane if its requests name it; otherwise its first call
    is seen as a new conversation.
    """
    opened = await testbed.open()
    await testbed.engine.say(call(feature.tool, **feature.arguments))
    if feature.in_background:
        await hold_calls(testbed, 2)
    await testbed.engine.say(*["Nothing found, all is well."] * 9)
    running = start(cli, testbed.address, opened.token, directory)
    if feature.in_background:
        await release_calls(testbed, 3)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(cli, running) is AgentExit.DONE, events[-3:]
    causes = [(row.fork_cause, row.kind, bool(row.lane)) for row in rows]
    if feature.lane:
        mains = [row for row in rows if not row.lane]
        assert len({row.lane for row in rows}) == 2 and ("sub_agent", "sub_agent", True) in causes, causes
        assert [row.fork_cause for row in mains] == ["root"] + [None] * (len(mains) - 1)
    else:
        assert causes == [("root", "main", False), ("root", "main", False), (None, "main", False)]
    # Codex may end while a sub-agent still waits for an answer, which is then not delivered.
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows if row.delivered)


async def test_codex_starts_two_sub_agents(testbed: Testbed, directory: Path) -> None:
    """Each has a lane of its own, and the main conversation stays one stream."""
    opened = await testbed.open()
    spawn = call("multi_agent_v1__spawn_agent", message="Find where it breaks.")
    await testbed.engine.say(f"{spawn}\n{spawn}")
    await hold_calls(testbed, 3)
    await testbed.engine.say(*["Nothing found, all is well."] * 9)
    running = start(CODEX, testbed.address, opened.token, directory)
    await release_calls(testbed, 4)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(CODEX, running) is AgentExit.DONE, events[-3:]
    subs = [row for row in rows if row.lane]
    mains = [row for row in rows if not row.lane]
    assert len({row.lane for row in subs}) == 2 and {row.kind for row in subs} == {"sub_agent"}, events
    assert [row.fork_cause for row in subs if row.fork_cause] == ["sub_agent"] * 2
    assert [row.fork_cause for row in mains] == ["root"] + [None] * (len(mains) - 1)
    # Codex may end while a sub-agent still waits for an answer, which is then not delivered.
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows if row.delivered)
