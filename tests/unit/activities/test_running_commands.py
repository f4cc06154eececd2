"""Heartbeats name the pre_command that runs, for how long, and what it printed last."""

import re
import subprocess

import pytest
from temporalio.testing import ActivityEnvironment

from activities.running_commands import RunningPreCommand, shortened
from grading.git_scripts import prepare_script

COMMANDS = ["echo fetching >&2", "printf 'half a' >&2; printf ' line\\nrest' >&2", "exit 3"]


def stderr_of(commands: list[str]) -> str:
    script = prepare_script("/nowhere", commands, None)
    lines = "\n".join(line for line in script.splitlines() if "pre_command" in line)
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_the_command_that_runs_is_named(size: int) -> None:
    running = RunningPreCommand()
    running.pre_commands = COMMANDS
    said = stderr_of(COMMANDS[:2])
    for start in range(0, len(said), size):
        running.read(said[start : start + size])
    told = await ActivityEnvironment().run(running.told)
    assert re.match(r"pre_command 2 of 3 has run for \d+\.?\d* s: `printf 'half a' >&2;", told)
    assert "it printed last: half a line; this try" in told


async def test_before_the_first_command() -> None:
    told = await ActivityEnvironment().run(RunningPreCommand().told)
    assert told.startswith("the repository is unpacked")


def test_a_long_command_is_one_short_line() -> None:
    line = shortened("set -e\n" + "make all\n" * 100)
    assert line.startswith("set -e make all") and len(line) == 200 and line.endswith("…")
