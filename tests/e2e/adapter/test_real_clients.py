"""Claude Code, Codex, OpenCode and Qwen Code, unmodified, with tools, thinking, sub-agents, malformed output, full
contexts and servers that are killed.

Each test is a promise of the adapter to programs that we cannot change. A test is skipped if the program cannot be
fetched.
"""

import signal
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from activities.harnesses.base import json_lines
from adapter.turns.loss_mask import build_chains
from ratchet.types import AgentExit
from store import turns
from tests.e2e.adapter.conftest import (
    CLAUDE_CODE,
    CLIS,
    CODEX,
    Cli,
    RunningCli,
    Testbed,
    call,
    cli_settings,
    each_agent,
    start,
)
from tests.e2e.adapter.feature_matrix import COMPACTION, RETURN, Compaction, Return
from tests.integration.adapter.conftest import Opened, adapter_process, line_to

pytestmark = pytest.mark.timeout(3000)
EACH_CLI = pytest.mark.parametrize("cli", CLIS.values(), ids=CLIS)
_OFTEN = ("claude_code", "codex")

STEP = "I look for the loop, step"
SUMMARY = "The parser in reader.py was read, its loop was found to be off by one, and nothing has been changed so far."


def summaries_of(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [(row.fork_cause, row.kind, row.state, row.delivered) for row in rows]


async def num_trained(opened: Opened) -> list[int]:
    """Trained tokens of each chain."""
    async with opened.database.begin() as conn:
        return [chain.num_trained for chain in build_chains(await turns.load_metas(conn, opened.rollout_id, 1))]


def read_end(cli: Cli, running: RunningCli) -> AgentExit:
    return cli.harness.exit_of_events(json_lines(running.output.read_bytes()), running.process.returncode)


@each_agent(RETURN)
async def test_a_tool_loop_with_thinking_is_one_stream(
    cli: Cli, feature: Return, testbed: Testbed, directory: Path
) -> None:
    """The program sends all thinking back, and each turn continues the last one, also if the program is started again
    to resume its conversation.
    """
    opened = await testbed.open()
    texts = ["Writing.\n" + cli.call("echo hi > a.txt"), cli.call("cat a.txt; echo '<|im_end|>'"), "All done.", "Bye."]
    await testbed.engine.say(*(f"<think>\n{STEP} {at}\n</think>\n\n{text}" for at, text in enumerate(texts)))
    async with line_to(testbed.settings.port) as (port, line):
        running = start(cli, f"http://127.0.0.1:{port}", opened.token, directory)
        events = await running.end()
        assert (running.workdir / "a.txt").read_text() == "hi\n", events[-3:]
        assert running.process.returncode == 0 and "All done." in str(events)
        running = start(cli, f"http://127.0.0.1:{port}", opened.token, directory, extra_args=feature.resume)
        events = await running.end()
    rows = await testbed.rows(opened)
    assert running.process.returncode == 0 and "Bye." in str(events), events[-3:]
    causes = ("root", None, None, feature.resumed_as)
    assert summaries_of(rows) == [(cause, "main", "completed", True) for cause in causes]
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows)
    for at in range(3):
        plain = f"{STEP} {at}".encode()
        forms = (plain, b64encode(plain), b"ratchet:" + b64encode(plain))
        assert sum(line.sent.count(f'"{feature.thinking}":"'.encode() + form) for form in forms) == 3 - at


@EACH_CLI
async def test_a_malformed_call_does_not_break_the_agent(cli: Cli, testbed: Testbed, directory: Path) -> None:
    """Half a tool call reaches the agent as plain text, and the agent ends normally with it."""
    opened = await testbed.open()
    await testbed.engine.say(
        cli.call("echo hi > a.txt"), f"<tool_call>\n<function={cli.tool}>\n<parameter={cli.argument}>\nls"
    )
    running = start(cli, testbed.address, opened.token, directory)
    events = await running.end()
    assert running.process.returncode == 0 and "<tool_call>" in str(events[-4:]), events[-4:]
    assert summaries_of(await testbed.rows(opened)) == [(cause, "main", "completed", True) for cause in ("root", None)]


@EACH_CLI
async def test_a_dropped_stream_is_retried_by_the_client_and_answered_once(
    cli: Cli, testbed: Testbed, directory: Path
) -> None:
    """The network fails while the model generates. The call goes on, and the program's retry gets its answer."""
    opened = await testbed.open()
    await testbed.engine.script({"ids": testbed.engine.ids(cli.call("echo hi > a.txt")), "hold": "gate"})
    await testbed.engine.say("All done.")
    async with line_to(testbed.settings.port) as (port, line):
        running = start(cli, f"http://127.0.0.1:{port}", opened.token, directory)
        await testbed.wait_for_calls(1)
        line.cut()
        line.mend()
        await testbed.engine.release("gate")
        events = await running.end()
    assert running.process.returncode == 0 and (running.workdir / "a.txt").is_file(), events[-3:]
    assert summaries_of(await testbed.rows(opened)) == [(cause, "main", "completed", True) for cause in ("root", None)]
    assert len((await testbed.engine.seen())["calls"]) == 2


@pytest.mark.parametrize("cli", [CLAUDE_CODE, CODEX], ids=["claude_code", "codex"])
async def test_a_full_context_is_recognised(cli: Cli, testbed: Testbed, directory: Path) -> None:
    """The program ends because of it, the harness recognises that exit, and no turn was made. OpenCode compacts
    instead.
    """
    opened = await testbed.open(max_context_tokens=3000)
    running = start(cli, testbed.address, opened.token, directory)
    events = await running.end()
    assert read_end(cli, running) is AgentExit.CONTEXT_FULL, events[-3:]
    assert await opened.turns() == [] and (await testbed.engine.seen())["calls"] == []


@each_agent(COMPACTION)
async def test_a_program_that_compacts_continues(
    cli: Cli, feature: Compaction, testbed: Testbed, directory: Path
) -> None:
    """It is given the size of the context, asks for a summary before it is full, and continues from the summary."""
    limit = feature.context_tokens
    opened = await testbed.open(max_context_tokens=limit, max_response_tokens=8000)
    # Qwen Code loses the output of some commands that end within milliseconds.
    command = "printf 'some words of code %.0s' $(seq {}); sleep 0.5"
    results = [cli.call(command.format(number)) for number in feature.num_words]
    await testbed.engine.say(*results, f"<{feature.tag}>\n{SUMMARY}\n</{feature.tag}>", "All done.")
    running = start(cli, testbed.address, opened.token, directory, max_context_tokens=limit, max_response_tokens=8000)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert read_end(cli, running) is AgentExit.DONE and "All done." in str(events[-2:]), [
        row.prompt_tokens for row in rows
    ]
    assert [(row.fork_cause, row.kind) for row in rows] == [
        ("root", "main"),
        (None, "main"),
        (feature.asked_as, "compaction"),
        ("compaction", "main"),
    ]
    # Codex and OpenCode ask for the summary without their tools, so the request before it may be the longest.
    assert rows[3].prompt_tokens < max(row.prompt_tokens for row in rows[:3]) < limit
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows)


@pytest.mark.parametrize("background", [False, True])
async def test_sub_agents_have_lanes_of_their_own(background: bool, testbed: Testbed, directory: Path) -> None:
    """Two at the same time with equal prompts: two samples in two lanes; the main conversation stays one stream."""
    opened = await testbed.open()
    task = call(
        "Agent",
        description="look",
        prompt="Find where it breaks.",
        subagent_type="investigator",
        run_in_background=background,
    )
    await testbed.engine.say(task + "\n" + task, *["Nothing found, all is well."] * 12)
    running = start(CLAUDE_CODE, testbed.address, opened.token, directory)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert running.process.returncode == 0, events[-3:]
    subs = [row for row in rows if row.lane]
    mains = [row for row in rows if not row.lane]
    assert len({row.lane for row in subs}) == 2 and {row.kind for row in subs} == {"sub_agent"}
    assert [row.fork_cause for row in subs].count("sub_agent") == 2 and {row.fork_cause for row in subs} <= {
        "sub_agent",
        None,
    }
    assert [row.fork_cause for row in mains] == ["root"] + [None] * (len(mains) - 1) and len(mains) >= 2
    assert {(row.state, row.delivered) for row in rows} == {("completed", True)}
    assert sum(await num_trained(opened)) == sum(row.num_sampled for row in rows)


@pytest.mark.parametrize(
    "cli", [pytest.param(cli, id=name, marks=() if name in _OFTEN else pytest.mark.slow) for name, cli in CLIS.items()]
)
async def test_an_adapter_killed_twice_in_mid_call(
    cli: Cli, testbed: Testbed, directory: Path, postgres_url: str, model_dir: Path
) -> None:
    """Each time, another process behind the same address takes over.

    Only the calls in flight are made again, and the chain is the same as without the kills.
    """
    opened = await testbed.open()
    engine = testbed.engine
    await engine.say(cli.call("echo one > a.txt"))
    await engine.script({"ids": engine.ids("lost"), "hold": "first"})
    await engine.say(cli.call("echo two > b.txt"))
    await engine.script({"ids": engine.ids("lost"), "hold": "second"})
    await engine.say(cli.call("echo three > c.txt"), "All done.")
    settings = [cli_settings(postgres_url, model_dir) for _ in range(2)]
    async with (
        adapter_process(settings[0]) as first,
        adapter_process(settings[1]) as second,
        line_to(settings[0].port) as (port, line),
    ):
        running = start(cli, f"http://127.0.0.1:{port}", opened.token, directory)
        await testbed.wait_for_calls(2)
        line.port = settings[1].port
        kill(first)
        await testbed.wait_for_calls(4)
        line.port = testbed.settings.port
        kill(second)
        events = await running.end()
        rows = await testbed.rows(opened)
    assert [(running.workdir / name).is_file() for name in ("a.txt", "b.txt", "c.txt")] == [True] * 3, events[-3:]
    assert running.process.returncode == 0
    assert [(row.fork_cause, row.state, row.ordinal) for row in rows] == [("root", "completed", 0)] + [
        (None, "completed", 0)
    ] * 3
    assert len((await engine.seen())["calls"]) == 4 + 2
    assert await num_trained(opened) == [sum(row.num_sampled for row in rows)]


def kill(process: Any) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
