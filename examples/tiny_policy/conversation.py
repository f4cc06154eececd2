"""A task's conversation with a shell, as text: byte for byte what `bash_agent` and the chat template make of it.

A warm start imitates such conversations, so that reinforcement learning starts on the same distribution.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from activities.harnesses.bash_agent.harness import DEFAULT_SYSTEM_PROMPT
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.simulated_shell import Files, quote_pattern, quote_replacement, run_command

TURN_END = "<|im_end|>"
CALL = re.compile(
    r"<tool_call>\n<function=bash>\n<parameter=command>\n(.*?)\n</parameter>\n</function>\n</tool_call>", re.DOTALL
)
DONE = "Done."
GIVE_UP = "I could not find the bug."


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation; `sampled` parts are the policy's and end with the stop token."""

    text: str
    sampled: bool


def opening_text(task: BugTask) -> str:
    return (
        f"<|im_start|>system\n{DEFAULT_SYSTEM_PROMPT}{TURN_END}\n"
        f"<|im_start|>user\n{task.issue}{TURN_END}\n<|im_start|>assistant\n"
    )


def call_text(command: str) -> str:
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def observation_text(observation: str) -> str:
    """Return the text between two of the policy's turns; its first newline belongs to the turn before it."""
    return f"\n<|im_start|>user\n<tool_response>\n{observation}\n</tool_response>{TURN_END}\n<|im_start|>assistant\n"


def cat_command(file: str) -> str:
    return f"cat {file}"


def edit_command(file: str, old: str, new: str) -> str:
    return f"sed -i 's/{quote_pattern(old)}/{quote_replacement(new)}/' {file}"


class Conversation:
    """Play the expert's turns against the simulated shell."""

    def __init__(self, task: BugTask) -> None:
        self.files: Files = dict(task.files)
        self.fixed_files: Files = dict(task.fixed_files)
        self.pieces = [Piece(opening_text(task), sampled=False)]

    def call(self, command: str) -> None:
        self.pieces.append(Piece(call_text(command) + TURN_END, sampled=True))
        self.pieces.append(Piece(observation_text(run_command(command, self.files, self.fixed_files)), sampled=False))

    def say(self, text: str) -> None:
        self.pieces.append(Piece(text + TURN_END, sampled=True))


Expert = Callable[[Conversation, BugTask, random.Random], None]
"""Plays the policy's part of one conversation."""


def called_command(turn: str) -> str | None:
    """Return the command of a sampled turn (without its stop token), None if the turn calls no tool."""
    match = CALL.search(turn)
    return match[1] if match else None
