"""The plays of the curriculum's expert end as their names say; its shell answers as the real programs do."""

import random
import sys
from pathlib import Path

import pytest

from activities.harnesses.bash_agent.agent import run_bash
from examples.curriculum.expert import REPOSITORY_PLAYS
from examples.curriculum.recipe import CURRICULUM, CURRICULUM_MIX
from examples.curriculum.tasks import draw_repository
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.conversation import Conversation, called_command
from examples.tiny_policy.simulated_shell import CHECK_FILE, run_command

SOLVED = {"good": True, "second_try": True, "third_try": True, "unchecked": None}
"""The plays that may fix the bug: True if a play fixes it, None if it does by chance. All others leave it."""


def tasks(number: int = 60) -> list[BugTask]:
    rng = random.Random(11)
    return [CURRICULUM.draw_task(rng, "warm start") for _ in range(number)]


@pytest.mark.parametrize("kind", REPOSITORY_PLAYS)
def test_a_play_ends_as_its_name_says(kind: str) -> None:
    rng = random.Random(kind)
    for task in tasks():
        talk = Conversation(task)
        REPOSITORY_PLAYS[kind](talk, task, rng)
        expected = SOLVED.get(kind, False)
        assert expected is None or (talk.files == task.fixed_files) == expected


def test_the_mix_names_plays_and_adds_up() -> None:
    assert set(CURRICULUM_MIX) <= set(REPOSITORY_PLAYS) and sum(CURRICULUM_MIX.values()) == pytest.approx(1)


def write_repository(folder: Path, task: BugTask) -> None:
    for name, text in task.files.items():
        (folder / name).write_text(text.replace("/opt/ratchet/bin/python3", sys.executable))
    (folder / CHECK_FILE).chmod(0o755)


@pytest.mark.parametrize(("kind", "family"), [("warm", "default_value"), ("new", "comparison"), ("unseen", "key")])
def test_the_simulated_shell_agrees_with_the_real_programs(kind: str, family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    for number in range(4):
        task = draw_repository(rng, kind, family)
        folder = tmp_path / str(number)
        folder.mkdir()
        write_repository(folder, task)
        talk = Conversation(task)
        files = dict(task.files)
        REPOSITORY_PLAYS["third_try"](talk, task, rng)
        commands = [command for piece in talk.pieces if piece.sampled and (command := called_command(piece.text))]
        for command in [*commands, "cat *.py && ./check", f"cat missing.py && cat {task.entry}", "./check"]:
            simulated = run_command(command, files, dict(task.fixed_files))
            assert simulated == run_bash(command, str(folder), 10, 10_000)[0], command
        assert files[task.faulty] == (folder / task.faulty).read_text()


def test_an_edit_that_breaks_the_file_fails_the_check(tmp_path: Path) -> None:
    task = tasks(1)[0]
    write_repository(tmp_path, task)
    command = f"sed -i 's/return/retrun/' {task.faulty} && ./check"
    simulated = run_command(command, dict(task.files), dict(task.fixed_files))
    assert simulated == run_bash(command, str(tmp_path), 10, 10_000)[0] == "FAIL\nexit code 1"
