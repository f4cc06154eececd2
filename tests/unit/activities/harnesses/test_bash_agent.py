"""The bash agent against a scripted server: its conversation, its handling of errors, its exit codes.

Its messages are what the policy sees, and its exits decide whether a rollout is graded.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from activities.harnesses import launcher
from activities.harnesses.base import DEFAULT_PROMPT, HarnessSpec, render_prompt
from activities.harnesses.bash_agent import agent, harness
from ratchet.types import AgentExit
from tests.standins.chat_engine import DROP, Answer, ChatEngine, calls, refuses, says
from tests.unit.activities.harnesses.conftest import HostBox


def make_spec(url: str, workdir: Path | str, **changes: Any) -> HarnessSpec:
    values: dict[str, Any] = {
        "adapter_base_url": url,
        "model_name": "policy",
        "workdir": str(workdir),
        "prompt": "Fix it.",
        "max_turns": 5,
        "step_timeout_seconds": 5,
        "time_budget_seconds": 60,
        **changes,
    }
    return HarnessSpec(**values)


def run_agent(folder: Path, answers: list[Answer], **changes: Any) -> tuple[int, list[dict[str, Any]], ChatEngine]:
    """Return exit code, transcript, and the engine with its requests; the workdir is `folder`."""
    with ChatEngine(answers) as engine:
        spec = make_spec(engine.url, folder, **changes)
        for name, data in harness.BashAgent().configure(spec).items():
            (folder / name).write_bytes(data)
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "agent.py", "config.json"],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "RATCHET_SESSION_TOKEN": "the-token"},
            capture_output=True,
            timeout=60,
            check=False,
        )
    return ran.returncode, [json.loads(line) for line in ran.stdout.splitlines()], engine


def last_observation(engine: ChatEngine) -> str:
    message = engine.requests[-1].body["messages"][-1]
    assert message["role"] == "tool"
    return str(message["content"])


def test_a_conversation(tmp_path: Path) -> None:
    code, transcript, engine = run_agent(tmp_path, [calls("echo one > f; cat f", "false"), says("Done.")])
    assert code == agent.EXIT_DONE
    first, second = engine.requests
    assert first.path == "/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer the-token"
    assert first.headers["x-stainless-retry-count"] == "0"
    assert first.body["messages"] == [
        {"role": "system", "content": harness.DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": "Fix it."},
    ]
    assert first.body["stream"] is False
    assert [tool["function"]["name"] for tool in first.body["tools"]] == ["bash"]
    answer, *observations = second.body["messages"][2:]
    assert answer == calls("echo one > f; cat f", "false")[1]["choices"][0]["message"]
    assert observations == [
        {"role": "tool", "tool_call_id": "call_0", "content": "one"},
        {"role": "tool", "tool_call_id": "call_1", "content": "exit code 1"},
    ]
    assert [event["event"] for event in transcript] == ["start", "turn", "step", "step", "turn", "exit"]


@pytest.mark.parametrize(
    ("command", "observation"),
    [
        ("true", "(no output)"),
        ("printf 'a\\n\\nb\\n\\n'", "a\n\nb"),
        ("echo out; echo err >&2; exit 3", "out\nerr\nexit code 3"),
        ("cat missing.py", "cat: missing.py: No such file or directory\nexit code 1"),
        ("printf '\\377'", "\ufffd"),
        ("echo ${RATCHET_SESSION_TOKEN:-none}", "none"),
        ("kill -9 $$", "exit code -9"),
        ("sleep 300 & echo here", "here"),
        ("exec >&- 2>&-; sleep 0.2; exit 4", "exit code 4"),
        ("read line; echo got $?", "got 1"),
    ],
)
def test_observations(tmp_path: Path, command: str, observation: str) -> None:
    _, _, engine = run_agent(tmp_path, [calls(command), says("Done.")])
    assert last_observation(engine) == observation


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    _, transcript, engine = run_agent(
        tmp_path, [calls("echo before; sleep 300 | sleep 300"), says("Done.")], step_timeout_seconds=0.4
    )
    assert last_observation(engine) == "before\ntimed out after 0.4 seconds"
    assert [event["seconds"] < 100 for event in transcript if event["event"] == "step"] == [True]


def test_endless_output_is_capped_and_timed_out(tmp_path: Path) -> None:
    extra = {"output_limit_bytes": 100}
    _, _, engine = run_agent(tmp_path, [calls("yes"), says("Done.")], step_timeout_seconds=0.4, extra=extra)
    text = last_observation(engine)
    assert text.startswith("y\n" * 25 + "\n... ")
    assert text.endswith("timed out after 0.4 seconds")
    assert len(text) < 250


@pytest.mark.parametrize(
    ("call", "observation"),
    [
        (calls("ls", name="python"), "error: no tool python"),
        (calls(), ""),
    ],
)
def test_an_unknown_tool_is_answered(tmp_path: Path, call: Answer, observation: str) -> None:
    code, _, engine = run_agent(tmp_path, [call, says("Done.")])
    assert code == agent.EXIT_DONE
    assert not observation or last_observation(engine) == observation


@pytest.mark.parametrize("arguments", ["", "{", "[]", "{}", '{"command": 3}', '{"command": "a\\u0000b"}'])
def test_arguments_that_are_no_command_are_answered(arguments: str) -> None:
    command, complaint = agent.read_command({"function": {"name": "bash", "arguments": arguments}})
    assert (command, complaint) == (None, "error: bash needs the parameter command")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([says("Done.")], agent.EXIT_DONE),
        ([calls("true")], agent.EXIT_TURN_LIMIT),
        ([refuses(400, "context_length_exceeded")], agent.EXIT_CONTEXT_FULL),
        ([says("and so on and", "length")], agent.EXIT_CONTEXT_FULL),
        ([refuses(403, "turn_limit_reached")], agent.EXIT_TURN_LIMIT),
        ([refuses(401)], agent.EXIT_STARVED),
        ([calls("true"), refuses(401)], agent.EXIT_REFUSED),
        ([refuses(400, "bad_request")], agent.EXIT_REFUSED),
        ([refuses(404)], agent.EXIT_REFUSED),
        ([refuses(413)], agent.EXIT_CONTEXT_FULL),
        ([(400, {"error": {"message": "the engine refused this call: x"}})], agent.EXIT_STARVED),
        ([refuses(503)], agent.EXIT_STARVED),
        ([DROP], agent.EXIT_STARVED),
        ([(200, {"no": "choices"})], agent.EXIT_STARVED),
    ],
)
def test_exit_codes(tmp_path: Path, answers: list[Answer], expected: int) -> None:
    code, transcript, _ = run_agent(tmp_path, answers, extra={"outage_seconds": 0.5})
    assert code == expected
    assert transcript[-1]["event"] == "exit"
    assert transcript[-1]["exit_code"] == expected


def test_trouble_is_waited_out_with_the_same_call(tmp_path: Path) -> None:
    code, transcript, engine = run_agent(tmp_path, [calls("true"), DROP, refuses(529), refuses(429), says("Done.")])
    assert code == agent.EXIT_DONE
    repeated = engine.requests[1:]
    assert [request.headers["x-stainless-retry-count"] for request in repeated] == ["0", "1", "2", "3"]
    assert all(request.body == repeated[0].body for request in repeated)
    assert [event["retries"] for event in transcript if event["event"] == "turn"] == [0, 3]


def test_an_adapter_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    with ChatEngine([says("x")]) as engine:
        port = engine.port
    config = tmp_path / "config.json"
    config.write_bytes(harness.BashAgent().configure(make_spec(f"http://127.0.0.1:{port}", tmp_path))["config.json"])
    process = subprocess.Popen([sys.executable, agent.__file__, str(config)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert b"start" in process.stdout.readline()  # it has called, and no server listens
    with ChatEngine([says("Done.")], port=port) as engine, process:
        assert process.wait(100) == agent.EXIT_DONE
    assert engine.requests


def test_a_cut_call_is_not_run(tmp_path: Path) -> None:
    status, body = calls("touch ran")
    body["choices"][0]["finish_reason"] = "length"
    assert run_agent(tmp_path, [(status, body)])[0] == agent.EXIT_CONTEXT_FULL
    assert not (tmp_path / "ran").exists()


async def test_the_harness_runs_it_in_a_box(host_box: HostBox, agent_user: str) -> None:
    workdir = host_box.root / "work"
    workdir.mkdir()
    workdir.chmod(0o777)
    bash_agent = harness.BashAgent()
    with ChatEngine([calls("id -u > who; cat who"), refuses(400, "context_length_exceeded")]) as engine:
        spec = make_spec(engine.url, workdir, agent_user=agent_user)
        await bash_agent.install(host_box, spec)
        assert (await bash_agent.start(host_box, spec, 1, "the-token")).started
        report = await bash_agent.wait(host_box, 1)
    assert (report.kind, report.exit_code) == (AgentExit.CONTEXT_FULL, agent.EXIT_CONTEXT_FULL)
    assert "context_length_exceeded" in report.detail
    transcript = await bash_agent.collect(host_box, 1)
    assert (transcript.num_turns, transcript.num_steps) == (1, 1)
    assert engine.requests[-1].body["messages"][-1]["content"] == agent_user
    await launcher.end_tree(host_box, 1)
    assert (await bash_agent.collect(host_box, 2)).data == b""


async def test_exit_kinds(host_box: HostBox, agent_user: str) -> None:
    bash_agent = harness.BashAgent()
    codes = {
        0: AgentExit.DONE,
        10: AgentExit.TURN_LIMIT,
        11: AgentExit.CONTEXT_FULL,
        12: AgentExit.STARVED,
        13: AgentExit.CRASHED,
        137: AgentExit.CRASHED,
    }
    for exit_code, kind in codes.items():
        assert await bash_agent.read_exit(host_box, 1, exit_code, "") is kind


def test_a_torn_last_line_does_not_count() -> None:
    transcript = harness.BashAgent().read_transcript(b'{"event": "turn"}\n[1]\n{"event": "tu')
    assert (transcript.num_turns, transcript.num_steps) == (1, 0)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        harness.BashAgent().configure(make_spec("http://x", "/w", extra={"colour": "red"}))


def test_prompts_keep_foreign_braces() -> None:
    assert render_prompt("{workdir}: {problem_statement} {x}", "use {workdir}", "/w") == "/w: use {workdir} {x}"
    assert "/w" in render_prompt(DEFAULT_PROMPT, "p", "/w")
