"""The simulated shell's output and effect equal the real one's for every command that the expert uses.

A warm start on other output would train the policy on observations that no box gives.
"""

import random
import re
from pathlib import Path

import pytest

from activities.harnesses.bash_agent.agent import run_bash
from examples.tiny_policy.bug_tasks import FAMILIES, FILE_STEMS, draw_task
from examples.tiny_policy.conversation import cat_command, edit_command
from examples.tiny_policy.simulated_shell import run_command


@pytest.mark.parametrize("family", FAMILIES)
def test_it_agrees_with_the_real_programs(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    for _ in range(6):
        task = draw_task(rng, family)
        other = rng.choice([f"{stem}.py" for stem in FILE_STEMS if f"{stem}.py" != task.entry])
        for command in (
            cat_command(task.entry),
            edit_command(task.entry, task.wrong, task.right),
            edit_command(task.entry, rng.choice(task.alternatives), rng.choice(task.alternatives)),
            edit_command(other, task.wrong, task.right),
            cat_command(other),
        ):
            (tmp_path / task.entry).write_text(task.source)
            files = {task.entry: task.source}
            assert run_command(command, files) == run_bash(command, str(tmp_path), 10, 10_000)[0], command
            assert files[task.entry] == (tmp_path / task.entry).read_text(), command
        (tmp_path / task.entry).unlink()


def test_the_right_edit_makes_the_fixed_file() -> None:
    rng = random.Random(1)
    for family in FAMILIES:
        for _ in range(100):
            task = draw_task(rng, family)
            files = {task.entry: task.source}
            run_command(edit_command(task.entry, task.wrong, task.right), files)
            assert files[task.entry] == task.fixed_source


@pytest.mark.parametrize("command", ["rm -rf /", "catx", "cat a b", "./check", "sed -i 's/a/b/'", ""])
def test_other_commands_are_errors(command: str) -> None:
    files = {"a.py": "x\n"}
    assert re.search(r"exit code 127$", run_command(command, files))
    assert files == {"a.py": "x\n"}


def test_a_pattern_that_sed_refuses_is_an_error() -> None:
    assert "exit code 1" in run_command("sed -i 's/[a/b/' a.py", {"a.py": "x\n"})
