"""Every command that needs the stack, while it is stopped: one sentence and exit code 2, at once."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app, run_app
from tests.free_ports import free_ports

pytestmark = pytest.mark.timeout(60)  # a command that waits for a server that starts waits for longer

ASKING = {
    "pause": ["RUN"],
    "resume": ["RUN"],
    "resume --skip-step": ["RUN", "-m", "its gradient is not finite"],
    "stop": ["RUN", "--now"],
    "stop --drain": ["RUN"],
    "stop -m unneeded": ["5"],
    "set": ["RUN", "training.max_staleness=2"],
    "set --add-steps 3": ["RUN"],
    "retry": ["5", "--stage", "boot"],
    "evaluate": ["RUN"],
    "fork": ["12@3"],
    "chat": ["RUN"],
    "chat --config never-made": ["RUN@3"],
    "status": ["RUN"],
    "watch": ["RUN"],
    "watch --once": ["5"],
    "explain": ["RUN"],
    "explain --advice": ["RUN"],
    "recall --since 2026-11-01T12:00+02:00": ["RUN", "--grader", "eval_cmd"],
    "recall --apply": ["RUN", "--family", "odds"],
    "sql": ["SELECT 1"],
    "view": ["5"],
    "publish": ["RUN", "--out", "published"],
    "show runs": [],
    "show groups": ["RUN"],
    "show rollouts": ["RUN"],
    "show rollout": ["5"],
    "show waiting": ["RUN"],
    "show mix": ["RUN"],
    "show forks": ["RUN"],
    "show requests": ["RUN"],
    "tasks list": [],
    "tasks check --boxes": ["datasets/quickstart/train.jsonl"],
    "tasks show": ["5"],
    "tasks import": ["datasets/quickstart/train.jsonl"],
    "tasks admit": ["datasets/quickstart/train.jsonl"],
    "tasks regrade": ["group/RUN/3"],
    "tasks images build": ["datasets"],
    "models checkpoints list": ["RUN"],
    "models checkpoints export": ["RUN", "never-made"],
    "admin sweep": [],
    "admin export": ["RUN"],
    "admin backup": ["never-made"],
    "admin prune": [],
    "admin sandboxes": [],
    "admin sandboxes kill": ["5"],
    "admin sandboxes shell": ["5"],
}
"""Command, with options or not, → arguments with which it asks the stack."""
STARTING = {"train", "launch", "up", "tasks run", "admin restore"}
"""Commands that start the stack, or refuse to write while it runs."""
WITHOUT = {
    *(
        "down",
        "doctor",
        "tasks check",
        "tasks build",
        "tasks rules",
        "models check",
        "models get",
        "models tiny-policy",
    ),
    *(f"tasks images {name}" for name in ("import", "list", "remove")),
    *(f"admin {name}" for name in ("logs", "env", "config", "setup", "codec-server", "bench")),
    *("admin agents fetch", "admin agents list", "admin sandboxes check"),
}
"""Commands that need no stack, or say themselves what is stopped."""


@pytest.fixture(autouse=True)
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)  # commands that use boxes set the variables of their service
    for name in ("RATCHET_DATABASE_URL", "RATCHET_READER_DATABASE_URL", "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    free_ports(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)


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
        ["stop", "group/RUN"],
        ["stop", "9" * 30],
        ["retry", "group/RUN"],
        ["retry", "nonsense", "--stage", "boot"],
    ],
)
def test_a_name_of_no_known_form_is_refused_before_anything_is_asked(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(one for one in arguments if one not in ("stop", "retry"))
    assert f"{name!r} names no group, rollout or evaluation" in refused(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("command", ["status", "show waiting", "show requests", "explain --advice", "pause", "resume"])
def test_what_cannot_be_a_run_is_refused_before_anything_is_asked(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'group/RUN/3' cannot be the id of a run" in refused(monkeypatch, capsys, *command.split(), "group/RUN/3")


def test_every_command_is_tried_or_needs_no_stack() -> None:
    def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
        if not getattr(command, "commands", None) or getattr(command, "invoke_without_command", False):
            yield " ".join(words)
        for name, one in getattr(command, "commands", {}).items():
            if not one.hidden:
                yield from leaves(one, (*words, name))

    tried = {re.sub(" -.*", "", name) for name in ASKING}
    assert tried | STARTING | WITHOUT == set(leaves(typer.main.get_command(app)))
