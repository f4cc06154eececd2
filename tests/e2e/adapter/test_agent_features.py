"""What agents use beside text and shell, with the unmodified programs: images, namespaces of tools, sub-agents.

Each is an act of the policy; none may end the rollout. A test is skipped if the program cannot be fetched.
"""

from pathlib import Path

import pytest

from ratchet.types import AgentExit
from tests.e2e.adapter.conftest import CLAUDE_CODE, CODEX, OPENCODE, Cli, Testbed, call, start
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


@pytest.mark.parametrize(("cli", "view"), [(CLAUDE_CODE, "Read"), (CODEX, "view_image")], ids=["claude_code", "codex"])
async def test_an_image_does_not_end_the_rollout(cli: Cli, view: str, testbed: Testbed, directory: Path) -> None:
    opened = await testbed.open()
    path = directory / "repo" / "a.png"
    argument = "file_path" if view == "Read" else "path"
    script = f"python3 - <<'PY'\n{PICTURE}\nPY"
    await testbed.engine.say(cli.call(script), call(view, **{argument: str(path)}), "It is red.")
    running = start(cli, testbed.address, opened.token, directory)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert path.is_file() and read_end(cli, running) is AgentExit.DONE, events[-3:]
    last = (await testbed.engine.seen())["calls"][-1]["ids"]
    assert "[image, 31x7, omitted]" in testbed.engine.renderer.tokenizer.decode(last), events[-3:]
    assert [row.fork_cause for row in rows] == ["root", None, None]
    assert await num_trained(opened) == [sum(row.num_sampled for row in rows)]


async def test_opencodes_sub_agent_has_a_lane_of_its_own(testbed: Testbed, directory: Path) -> None:
    opened = await testbed.open()
    task = call("task", description="look", prompt="Find where it breaks.", subagent_type="general")
    await testbed.engine.say(task, "Nothing found, all is well.", "All done.")
    running = start(OPENCODE, testbed.address, opened.token, directory)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(OPENCODE, running) is AgentExit.DONE, events[-3:]
    assert [(row.fork_cause, row.kind, bool(row.lane)) for row in rows] == [
        ("root", "main", False),
        ("sub_agent", "sub_agent", True),
        (None, "main", False),
    ]
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows)


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


async def test_codex_calls_a_tool_of_an_mcp_server(testbed: Testbed, directory: Path) -> None:
    """Codex sends the tools of a server as a namespace."""
    server = directory / "calc.py"
    server.write_text(MCP_SERVER)
    opened = await testbed.open()
    await testbed.engine.say(call("mcp__calc__add", a=40, b=2), "All done.")
    servers = f"-c mcp_servers.calc.command=python3 -c 'mcp_servers.calc.args=[\"{server}\"]'"
    running = start(CODEX, testbed.address, opened.token, directory, extra_args=servers)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(CODEX, running) is AgentExit.DONE, events[-3:]
    last = (await testbed.engine.seen())["calls"][-1]["ids"]
    assert "the sum is 42" in testbed.engine.renderer.tokenizer.decode(last), events[-3:]
    assert [row.fork_cause for row in rows] == ["root", None]


async def test_codex_starts_two_sub_agents(testbed: Testbed, directory: Path) -> None:
    """Each has a lane of its own, and the main conversation stays one stream."""
    opened = await testbed.open()
    engine = testbed.engine
    spawn = call("multi_agent_v1__spawn_agent", message="Find where it breaks.")
    wait = CODEX.call("sleep 3")  # of the main agent and of its sub-agents, in any order
    await engine.say(f"{spawn}\n{spawn}", wait, wait, wait)
    await engine.say(*["Nothing found, all is well."] * 9)
    running = start(CODEX, testbed.address, opened.token, directory)
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
