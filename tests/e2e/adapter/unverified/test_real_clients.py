"""Claude Code and Codex, unmodified, through what happens to agents: tools, sub-agents, nonsense, full contexts, dying servers.

Why here: each of these is the adapter's promise to a program that nobody can change.
Called by: pytest, in `make e2e`. A test skips where the program cannot be fetched.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from adapter.chains import build_chains
from adapter.settings import AdapterSettings
from ratchet.store import turns
from ratchet.store.database import Database
from tests.e2e.adapter.conftest import CLAUDE_CODE, CODEX, Cli, call, start
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_process, open_rollout
from tests.integration.adapter.test_dialects import stream_of

pytestmark = pytest.mark.timeout(900)
BOTH = pytest.mark.parametrize("cli", [CLAUDE_CODE, CODEX], ids=["claude_code", "codex"])


async def exact(opened: Opened, engine: ScriptedEngine) -> list[Any]:
    """The session's rows, after a look at whether each holds the very prompt that the engine saw."""
    rows = await opened.turns()
    calls = {one["request_id"]: one["ids"] for one in (await engine.seen())["calls"]}
    for row in rows:
        if row.state == "completed":
            assert calls[f"turn-{row.id}"] == stream_of(rows, row)[: row.prompt_tokens].tolist()
    return rows


@BOTH
async def test_a_tool_loop_is_one_stream(cli: Cli, settings: AdapterSettings, engine: ScriptedEngine, roomy: Opened, place: Path) -> None:
    await engine.say("Writing.\n" + cli.call("echo hi > a.txt"), cli.call("cat a.txt; echo '<|im_end|>'"), "All done.")
    async with adapter_process(settings):
        running = start(cli, f"http://127.0.0.1:{settings.port}", roomy.token, place)
        events = await running.end()
        rows = await exact(roomy, engine)
    assert (running.workdir / "a.txt").read_text() == "hi\n", events[-3:]
    assert running.process.returncode == 0 and "All done." in str(events)
    assert [(row.fork_cause, row.kind, row.state, row.delivered) for row in rows] == [
        ("root", "main", "completed", True),
        (None, "main", "completed", True),
        (None, "main", "completed", True),
    ]
    async with roomy.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, roomy.rollout_id, 1))
    assert chain.num_trained == sum(row.num_sampled for row in rows)


@BOTH
async def test_a_malformed_call_ends_nothing(
    cli: Cli, settings: AdapterSettings, engine: ScriptedEngine, roomy: Opened, place: Path
) -> None:
    """Half a call is plain text to the agent, as the model wrote it; the agent ends with it, in order."""
    await engine.say(cli.call("echo hi > a.txt"), f"<tool_call>\n<function={cli.tool}>\n<parameter={cli.argument}>\nls", "Sorry.")
    async with adapter_process(settings):
        running = start(cli, f"http://127.0.0.1:{settings.port}", roomy.token, place)
        events = await running.end()
        rows = await exact(roomy, engine)
    assert running.process.returncode == 0 and "<tool_call>" in str(events[-4:]), events[-4:]
    assert {row.state for row in rows} == {"completed"} and [row.fork_cause for row in rows][:2] == ["root", None]


@BOTH
async def test_an_adapter_killed_twice_in_mid_call(
    cli: Cli, settings: AdapterSettings, engine: ScriptedEngine, roomy: Opened, place: Path
) -> None:
    """The program goes on by itself; only the calls in flight are made again, and the chain is that of a calm day."""
    await engine.say(cli.call("echo one > a.txt"))
    await engine.script({"ids": engine.ids("lost"), "hold": "first"})
    running = None
    for hold, command in (("first", "echo two > b.txt"), ("second", "echo three > c.txt")):
        async with adapter_process(settings) as process:
            running = running or start(cli, f"http://127.0.0.1:{settings.port}", roomy.token, place)
            await wait_for_hold(engine, {"first": 2, "second": 4}[hold])
            process.send_signal(signal.SIGKILL)
            process.wait()
        await engine.say(cli.call(command))
        await (engine.script({"ids": engine.ids("lost"), "hold": "second"}) if hold == "first" else engine.say("All done."))
        await engine.release(hold)
    assert running is not None
    async with adapter_process(settings):
        events = await running.end()
        rows = await exact(roomy, engine)
    assert [(running.workdir / name).is_file() for name in ("a.txt", "b.txt", "c.txt")] == [True] * 3, events[-3:]
    assert running.process.returncode == 0
    assert [(row.fork_cause, row.state, row.ordinal) for row in rows] == [("root", "completed", 0)] + [(None, "completed", 0)] * 3
    assert len((await engine.seen())["calls"]) == 4 + 2
    async with roomy.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, roomy.rollout_id, 1))
    assert chain.num_trained == sum(row.num_sampled for row in rows)


async def wait_for_hold(engine: ScriptedEngine, num_calls: int) -> None:
    """Until that many calls have reached the engine, however slowly the program starts."""
    async with asyncio.timeout(400):
        while len((await engine.seen())["calls"]) < num_calls:
            await asyncio.sleep(0.1)


async def test_sub_agents_at_the_same_time_have_lanes_of_their_own(
    settings: AdapterSettings, engine: ScriptedEngine, roomy: Opened, place: Path
) -> None:
    """Two with equal prompts: two samples, two lanes; the main conversation stays one stream."""
    task = call("Agent", description="look", prompt="Find where it breaks.", subagent_type="investigator")
    await engine.say(task + "\n" + task, *["Nothing found, all is well."] * 12)
    async with adapter_process(settings):
        running = start(CLAUDE_CODE, f"http://127.0.0.1:{settings.port}", roomy.token, place)
        events = await running.end()
        rows = await exact(roomy, engine)
    assert running.process.returncode == 0, events[-3:]
    lanes = {row.lane for row in rows if row.lane}
    assert len(lanes) == 2 and {row.kind for row in rows if row.lane} == {"sub_agent"}
    assert {row.fork_cause for row in rows if row.lane} == {"sub_agent"}
    assert next(row.fork_cause for row in rows if not row.lane) == "root"
    assert {row.fork_cause for row in rows if not row.lane} <= {"root", None}
    assert {(row.state, row.delivered) for row in rows} == {("completed", True)}


@BOTH
async def test_a_full_context_is_understood_as_such(
    cli: Cli, settings: AdapterSettings, engine: ScriptedEngine, database: Database, place: Path
) -> None:
    """The program says so at its end (what the harness reads as `context_full`) and was given no turn."""
    opened = await open_rollout(database, max_context_tokens=3000)
    async with adapter_process(settings):
        running = start(cli, f"http://127.0.0.1:{settings.port}", opened.token, place)
        events = await running.end()
    said = str(events[-3:]).lower()
    assert any(sign in said for sign in ("prompt is too long", "context_length_exceeded", "context window")), events[-3:]
    assert await opened.turns() == [] and (await engine.seen())["calls"] == []
