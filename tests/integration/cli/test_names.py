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
    "watch --once", "models checkpoints list", "admin export",
]  # fmt: skip
COMMANDS = {
    Kind.RUN: OF_A_RUN,
    Kind.ROLLOUT: ["show rollout", "explain", "watch --once"],
    Kind.STEP: ["explain"],
    Kind.TASK: ["tasks show", "show rollout"],
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
    for number, form in enumerate(FORMS[kind]):
        more = ["--out", str(tmp_path / str(number))] if command == "admin export" else []
        monkeypatch.setattr("sys.argv", ["ratchet", *command.split(), *more, written(form, filled)])
        code = run_app()
        assert code == 0, capsys.readouterr().err
