"""The curriculum's tasks: the bug is where the task says, the cases tell the fix from every other
edit, and no kind of family reaches the part that must not have it.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from examples.curriculum.families import ALL_FAMILIES, NEW_FAMILIES, UNSEEN_FAMILIES, WARM_FAMILIES
from examples.curriculum.random_bugs import RANDOM_BUGS
from examples.curriculum.recipe import CURRICULUM
from examples.curriculum.tasks import (
    FAMILIES_OF,
    draw_repository,
    held_out_repositories,
    joined_source,
    train_repositories,
)
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.conversation import edit_command
from examples.tiny_policy.expected_results import call_results
from examples.tiny_policy.simulated_shell import run_command


def drawn(number: int = 20) -> Iterator[BugTask]:
    rng = random.Random(7)
    for kind, families in FAMILIES_OF.items():
        for family in families:
            for _ in range(number):
                yield draw_repository(rng, kind, family)


def test_the_right_edit_of_the_faulty_file_makes_the_fixed_files() -> None:
    for task in drawn():
        files = dict(task.files)
        run_command(edit_command(task.faulty, task.wrong, task.right), files)
        assert files == task.fixed_files, task
        changed = [name for name in files if files[name] != task.files[name]]
        assert changed == [task.faulty]


def test_no_other_edit_passes_the_check() -> None:
    tested = [task for task in drawn(5) if task.cases]  # random bugs are never run
    for task in [*tested, *train_repositories(), *held_out_repositories()]:
        right = call_results(joined_source(task.fixed_files, task.entry), task.function, task.cases)
        for option in {task.wrong, *task.alternatives}:
            files = dict(task.files)
            run_command(edit_command(task.faulty, task.wrong, option), files)
            results = call_results(joined_source(files, task.entry), task.function, task.cases)
            assert results != right, (task.family, task.source, option)


def test_half_of_the_bugs_are_in_the_function_that_the_issue_names() -> None:
    in_entry = Counter(task.faulty == task.entry for task in drawn())
    assert 0.4 < in_entry[True] / in_entry.total() < 0.6


def test_the_kinds_are_disjoint() -> None:
    assert len(ALL_FAMILIES) == len(WARM_FAMILIES) + len(NEW_FAMILIES) + len(UNSEEN_FAMILIES)
    assert {task.family for task in train_repositories()} == {*WARM_FAMILIES, *NEW_FAMILIES}
    assert {task.family for task in held_out_repositories()} == set(ALL_FAMILIES)


def test_no_bug_occurs_twice() -> None:
    tasks = [*train_repositories(), *held_out_repositories()]
    assert len({task.digest for task in tasks}) == len(tasks)


def test_the_warm_start_shows_only_its_families_and_no_task_of_a_dataset() -> None:
    excluded = {task.digest for task in [*train_repositories(), *held_out_repositories()]}
    tasks = CURRICULUM.new_tasks(random.Random(0))
    seen = [next(tasks) for _ in range(3000)]
    assert {task.family for task in seen} == {*WARM_FAMILIES, *RANDOM_BUGS}
    assert not excluded & {task.digest for task in seen}


@pytest.mark.parametrize("kind", FAMILIES_OF)
def test_an_issue_names_the_function_and_its_file(kind: str) -> None:
    for task in drawn(3):
        if task.kind == kind:
            assert task.issue.startswith(f"{task.function} in {task.entry} is wrong.")
            assert f"def {task.function}(" in task.files[task.entry]
