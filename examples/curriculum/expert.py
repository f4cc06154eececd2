"""A scripted expert that reads both files, edits, and runs the repository's check after an edit; wrong on purpose.

It is given the warm start's tasks only. In the first phase it is right at once; in the second it errs, may try again,
and often stops early.
"""

import random
from functools import partial

from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.conversation import DONE, GIVE_UP, Conversation, Expert, cat_command, edit_command
from examples.tiny_policy.simulated_shell import ALL_SOURCES, CHECK


def read(talk: Conversation) -> None:
    talk.call(cat_command(ALL_SOURCES))


def edit_and_check(talk: Conversation, file: str, old: str, new: str) -> None:
    talk.call(f"{edit_command(file, old, new)} && {CHECK}")


def try_options(talk: Conversation, task: BugTask, options: list[str]) -> None:
    now = task.wrong
    for option in options:
        edit_and_check(talk, task.faulty, now, option)
        now = option


def wrong_options(task: BugTask, rng: random.Random, number: int) -> list[str]:
    """Return up to `number` different wrong expressions, none of them the one in the file."""
    others = [option for option in task.alternatives if option != task.wrong]
    return rng.sample(others, min(number, len(others)))


def fix(talk: Conversation, task: BugTask, rng: random.Random, num_wrong: int) -> None:
    """Fix the bug after `num_wrong` tries that fail."""
    read(talk)
    try_options(talk, task, [*wrong_options(task, rng, num_wrong), task.right])
    talk.say(DONE)


def quit_after_failure(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    """Stop after a check that fails, as if it had passed."""
    read(talk)
    try_options(talk, task, wrong_options(task, rng, rng.choice([1, 1, 2])) or [task.wrong])
    talk.say(rng.choice([DONE, GIVE_UP]))


def edit_unchecked(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    """Edit without running the check."""
    read(talk)
    talk.call(edit_command(task.faulty, task.wrong, rng.choice([*task.alternatives, task.right])))
    talk.say(DONE)


def replace_by_itself(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    read(talk)
    edit_and_check(talk, task.faulty, task.wrong, task.wrong)
    talk.say(DONE)


def edit_other_file(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    """Edit the other file, in which the expression does not occur."""
    read(talk)
    other = next(name for name in task.files if name.endswith(".py") and name != task.faulty)
    edit_and_check(talk, other, task.wrong, task.right)
    talk.say(GIVE_UP)


def only_read(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    read(talk)
    talk.say(GIVE_UP)


REPOSITORY_PLAYS: dict[str, Expert] = {
    "good": partial(fix, num_wrong=0),
    "second_try": partial(fix, num_wrong=1),
    "third_try": partial(fix, num_wrong=2),
    "quits": quit_after_failure,
    "unchecked": edit_unchecked,
    "no_change": replace_by_itself,
    "wrong_file": edit_other_file,
    "give_up": only_read,
}
