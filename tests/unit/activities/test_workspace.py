"""A failed pre_command is named as the task's author wrote it, with what it printed first and last."""

import subprocess

from activities.workspace import of_pre_command
from grading.git_scripts import prepare_script
from ratchet.errors import CommandFailedError

COMMANDS = ["true", "echo 'the cause' >&2; seq 1000 >&2; echo 'the end' >&2; exit 3"]


def test_the_authors_command_is_named() -> None:
    whole = prepare_script("/nowhere", COMMANDS, None)
    line = next(line for line in whole.splitlines() if "pre_command 1" in line)
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    found = of_pre_command(CommandFailedError(whole, ended.returncode, "", ended.stderr), COMMANDS)
    assert str(found).startswith("`echo 'the cause' >&2; seq 1000 >&2;")
    assert "ended with exit code 3: the cause 1 2" in " ".join(str(found).split())
    assert str(found).endswith("the end")


def test_another_failure_stays_as_it_is() -> None:
    error = CommandFailedError("set -e", 1, "", "no space left on device")
    assert of_pre_command(error, COMMANDS) is error


def test_only_what_the_failed_command_printed_is_quoted() -> None:
    whole = prepare_script("/nowhere", ["echo of the first >&2", "echo of the second >&2; exit 4"], None)
    lines = [line for line in whole.splitlines() if "pre_command" in line]
    ended = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    found = of_pre_command(
        CommandFailedError(whole, ended.returncode, "", ended.stderr), ["", "echo of the second >&2; exit 4"]
    )
    assert found.stderr == "of the second\n"
