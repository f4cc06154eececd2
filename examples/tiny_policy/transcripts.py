"""A scripted expert that is wrong most of the time on purpose, and its conversations with a shell.

The warm start imitates these conversations. They equal, byte for byte, what `bash_agent` and the chat template make of
the same turns, so that reinforcement learning starts on the same distribution.
"""

import random

from examples.tiny_policy.bug_tasks import FILE_STEMS, BugTask
from examples.tiny_policy.conversation import DONE, GIVE_UP, Conversation, Expert, cat_command, edit_command


def read_then_edit(talk: Conversation, task: BugTask, new: str, file: str | None = None) -> None:
    talk.call(cat_command(task.entry))
    talk.call(edit_command(file or task.entry, task.wrong, new))
    talk.say(DONE)


def play_good(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    read_then_edit(talk, task, task.right)


def play_no_change(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    """Replace the expression with itself."""
    read_then_edit(talk, task, task.wrong)


def play_wrong_edit(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    read_then_edit(
        talk, task, rng.choice([option for option in task.alternatives if option != task.wrong] or [task.wrong])
    )


def play_wrong_file(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    other = rng.choice([f"{stem}.py" for stem in FILE_STEMS if f"{stem}.py" != task.entry])
    if rng.random() < 0.5:
        talk.call(cat_command(other))
        talk.say(GIVE_UP)
    else:
        read_then_edit(talk, task, task.right, other)


def play_give_up(talk: Conversation, task: BugTask, _rng: random.Random) -> None:
    talk.call(cat_command(task.entry))
    talk.say(GIVE_UP)


def play_blind(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    """Edit without reading, or claim at once to be done."""
    if rng.random() < 0.5:
        talk.call(edit_command(task.entry, rng.choice([task.wrong, *task.alternatives]), rng.choice(task.alternatives)))
    talk.say(DONE)


def play_unparsed(talk: Conversation, task: BugTask, rng: random.Random) -> None:
    """Write a command without a tool call, which ends the conversation."""
    if rng.random() < 0.5:
        talk.call(cat_command(task.entry))
        talk.say(edit_command(task.entry, task.wrong, task.right))
    else:
        talk.say(cat_command(task.entry))


PLAYS: dict[str, Expert] = {
    "good": play_good,
    "no_change": play_no_change,
    "give_up": play_give_up,
    "blind": play_blind,
    "wrong_edit": play_wrong_edit,
    "unparsed": play_unparsed,
    "wrong_file": play_wrong_file,
}
