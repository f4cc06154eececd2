"""Each command takes each form of a name."""

from pathlib import Path

import pytest

from cli.main import run_app
from store.names import Kind
from tests.integration.store.test_names import FORMS, filled, written
from tests.integration.viewer.filled_store import FilledRun

__all__ = ["filled"]
OF_A_RUN = [
    "show runs", "show groups", "show rollouts", "show waiting", "show mix", "show forks", "show requests", "explain",
    "watch --once", "models checkpoints list", "admin export NAME --out DIRECTORY", "status", "pause -m why",
    "recall NAME --grader pytest",
    "set NAME training.max_staleness=2 -m why", "stop -m why",
]  # fmt: skip
COMMANDS = {
    Kind.RUN: OF_A_RUN,
    Kind.ROLLOUT: ["show rollout", "explain", "watch --once", "recall RUN --rollout NAME"],
    Kind.STEP: ["explain"],
    Kind.TASK: ["tasks show", "show rollout", "recall RUN --task NAME"],
}
CASES = [(command, kind) for kind, commands in COMMANDS.items() for command in commands]


@pytest.mark.parametrize(("command", "kind"), CASES)
async def test_a_command_takes_each_form(
    command: str,
    kind: Kind,
    filled: FilledRun,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")  # it does not answer; a request is in the store first
    typed = command if "NAME" in command else f"{command} NAME"
    for number, form in enumerate(FORMS[kind]):
        filling = {"NAME": written(form, filled), "DIRECTORY": str(tmp_path / str(number)), "RUN": filled.run_id}
        monkeypatch.setattr("sys.argv", ["ratchet", *(filling.get(word, word) for word in typed.split())])
        code = run_app()
        assert code == 0, capsys.readouterr().err
