"""Without limits in the config, an agent's time budget is its only limit."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from activities.harnesses.claude_code import ClaudeCode
from activities.harnesses.mini_swe_agent import MiniSweAgent
from activities.harnesses.opencode import OpenCode
from activities.harnesses.qwen_code import QwenCode
from tests.standins.chat_engine import calls, says
from tests.unit.activities.harnesses.test_bash_agent import last_observation, make_spec, run_agent

NONE: dict[str, Any] = {"max_turns": None, "step_timeout_seconds": None}


def test_the_bash_agent_goes_on(tmp_path: Path) -> None:
    answers = [*(calls(f"echo {number}") for number in range(60)), says("Done.")]
    code, transcript, engine = run_agent(tmp_path, answers, **NONE)
    assert code == 0 and sum(event["event"] == "turn" for event in transcript) == 61
    assert last_observation(engine) == "59"


def test_claude_code_gets_no_limit() -> None:
    limited, free = (ClaudeCode().configure(make_spec("http://a", "/w", **values)) for values in ({}, NONE))
    for text in ("--max-turns", "BASH_MAX_TIMEOUT_MS", "BASH_DEFAULT_TIMEOUT_MS"):
        assert text in limited["command.sh"].decode() and text not in free["command.sh"].decode()


def test_variables_of_a_task_stand_below_those_of_the_harness() -> None:
    mine = {"ANTHROPIC_BASE_URL": "http://elsewhere", "LEVEL": "3 a"}
    spec = make_spec("http://adapter", "/w", extra_env={"OTHER": "mine"}, task_env=mine | {"OTHER": "task"})
    script = ClaudeCode().files(spec)["command.sh"].decode()
    exported = "\n".join(line for line in script.splitlines() if line.startswith("export "))
    shown = 'echo "$ANTHROPIC_BASE_URL $LEVEL $OTHER"'
    printed = subprocess.run(["sh", "-c", f"{exported}\n{shown}"], capture_output=True, text=True, check=True).stdout
    assert printed == "http://adapter 3 a mine\n"


def test_sets_are_printed_in_one_order_unless_image_or_task_says_otherwise() -> None:
    def order(image: dict[str, str], **more: Any) -> str:
        first = ClaudeCode().files(make_spec("http://a", "/w", **more))["command.sh"].decode().splitlines()[:2]
        script = "\n".join([*first, 'echo "$PYTHONHASHSEED"'])
        return subprocess.run(["sh", "-c", script], env=image, capture_output=True, text=True, check=True).stdout

    assert order({}) == "0\n" and order({"PYTHONHASHSEED": "random"}) == "random\n"
    assert order({}, task_env={"PYTHONHASHSEED": "7"}) == "7\n"


def test_what_the_brief_says_of_claude_code() -> None:
    spec = make_spec("http://a", "/w", extra_env={"BASH_MAX_TIMEOUT_MS": "7"})
    command = ClaudeCode().configure(spec)["command.sh"].decode()
    for text in ("investigator", "WebFetch,WebSearch", "--disable-slash-commands"):
        assert text in command
    assert ClaudeCode().environment(spec)["BASH_MAX_TIMEOUT_MS"] == "7", "its own variables come last"
    assert (
        "investigator"
        not in ClaudeCode().configure(make_spec("http://a", "/w", extra_args="-x"))["command.sh"].decode()
    )


def test_other_programs_get_their_word_for_no_limit() -> None:
    spec = make_spec("http://a", "/w", **NONE)
    mini = yaml.safe_load(MiniSweAgent().configure(spec)["overrides.yaml"])
    assert (mini["agent"]["step_limit"], mini["environment"]["timeout"]) == (0, 60)
    assert json.loads(QwenCode().configure(spec)["settings.json"])["model"]["maxSessionTurns"] == -1
    assert json.loads(OpenCode().configure(spec)["opencode.json"])["agent"] == {"build": {}}
