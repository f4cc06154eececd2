"""Every command that needs the stack, while it is stopped: one sentence and exit code 2, at once."""

from pathlib import Path

import pytest

from cli.main import COMMANDS, GROUPS, run_app
from stack.parts import free_ports

pytestmark = pytest.mark.timeout(60)  # a command that waits for a server that starts waits for longer

ASKING = {
    "pause": ["RUN"],
    "resume": ["RUN"],
    "drain": ["RUN"],
    "stop": ["RUN", "--now"],
    "skip-step": ["RUN", "-m", "its gradient is not finite"],
    "extend": ["RUN", "3"],
    "set": ["RUN", "training.max_staleness=2"],
    "steering": ["RUN"],
    "cancel": ["5"],
    "retry": ["5", "--stage", "boot"],
    "regrade": ["group/RUN/3"],
    "evaluate": ["RUN"],
    "advise": ["RUN"],
    "runs": [],
    "watch": ["RUN"],
    "mix": ["RUN"],
    "why": ["RUN"],
    "top": ["RUN"],
    "groups": ["RUN"],
    "rollouts": ["RUN"],
    "tail": ["5"],
    "show": ["5"],
    "explain": ["RUN"],
    "sql": ["SELECT 1"],
    "sweep": [],
    "export": ["RUN"],
    "forks": ["RUN"],
    "backup": ["never-made"],
    "prune": [],
    "view": ["5"],
    "sandboxes": [],
    "sandboxes kill": ["5"],
    "sandboxes shell": ["5"],
    "checkpoints list": ["RUN"],
    "tasks list": [],
    "tasks admit": ["datasets/quickstart/train.jsonl"],
    "images build": ["datasets"],
}
"""Command → arguments with which it asks the stack."""
STARTING = {"train", "launch", "rollout", "up", "restore"}
"""Commands that start the stack, or refuse to write while it runs."""
WITHOUT = {"down", "status", "doctor", "logs", "env", "mcp", "tiny-policy", "bench", "setup", "config", "codec-server"}
"""Commands that need no stack, or say themselves what is stopped."""


@pytest.fixture(autouse=True)
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RATCHET_DATABASE_URL", "RATCHET_READER_DATABASE_URL", "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    free_ports(tmp_path)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that ends with exit code 2, and return what it says."""
    monkeypatch.setattr("sys.argv", ["ratchet", *arguments])
    code = run_app()
    printed = capsys.readouterr()
    assert code == 2, printed
    return " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize("command", ASKING)
def test_a_command_says_that_the_stack_is_stopped(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, *command.split(), *ASKING[command])
    assert "ratchet up" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["cancel", "nonsense"],
        ["cancel", "9" * 30],
        ["retry", "group/RUN"],
        ["retry", "nonsense", "--stage", "boot"],
        ["regrade", "evaluate/RUN"],
    ],
)
def test_a_name_of_no_known_form_is_refused_before_anything_is_asked(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{arguments[1]!r} names no group, rollout or evaluation" in refused(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("command", ["why", "top", "steering", "advise", "pause", "resume"])
def test_what_cannot_be_a_run_is_refused_before_anything_is_asked(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'group/RUN/3' cannot be the id of a run" in refused(monkeypatch, capsys, command, "group/RUN/3")


def test_every_command_is_tried_or_needs_no_stack() -> None:
    names = {function.__module__.rsplit(".", 1)[-1].replace("_", "-") for function in COMMANDS}
    assert {name.split()[0] for name in ASKING} | STARTING | WITHOUT == names | {
        group.info.name for group in GROUPS if group.info.name in ("sandboxes", "checkpoints", "tasks", "images")
    }
