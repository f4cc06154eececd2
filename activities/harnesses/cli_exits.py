"""Classify the API errors with which vendors' CLIs end.

A CLI that ended because the adapter or the engines failed (`starved`) must not count as an agent that failed its task.
"""

from activities.harnesses import launcher
from activities.sandboxes.base import Sandbox
from ratchet.types import AgentExit

_TAIL_BYTES = 65_536
# Texts of the adapter (adapter/prompt/prompt_builder.py, adapter/turns) and those that the vendors' clients substitute.
_CONTEXT_FULL = (
    "prompt is too long",
    "context_length_exceeded",
    "context window",
    "contextwindowexceeded",
    "maximum context length",
)
# Several answers in a row were cut off at the token limit, which is caused by the policy, like a full context.
_ANSWER_FULL = ("output token maximum",)
_TURN_LIMIT = ("turn limit", "turn_limit", "error_max_turns", "limitsexceeded", "max_turns")


async def last_output(box: Sandbox, attempt: int) -> bytes:
    """Return the last 64 KiB of the program's output, which contain its closing event."""
    found = await box.exec(f"tail -c {_TAIL_BYTES} {launcher.output_path(attempt)}", user="root", check=False)
    return found.stdout.encode()


def exit_of_error(words: str) -> AgentExit:
    """Classify an error of a model call: context full, turn limit, or otherwise `starved`."""
    lower = words.lower()
    if any(sign in lower for sign in (*_CONTEXT_FULL, *_ANSWER_FULL)):
        return AgentExit.CONTEXT_FULL
    return AgentExit.TURN_LIMIT if any(sign in lower for sign in _TURN_LIMIT) else AgentExit.STARVED
