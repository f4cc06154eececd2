"""How the vendors' CLIs end, as far as it is the same for all: what an API error in their last words means.

Why here: a CLI that stopped because of us must not be taken for one that failed its task.
Called by: `claude_code.py`, `codex.py`, `mini_swe_agent.py`.
"""

from activities.harnesses import launcher
from activities.sandboxes.base import Sandbox
from ratchet.types import AgentExit

_TAIL_BYTES = 65_536
# The adapter's own words (adapter/prompt/prompt_builder.py, adapter/turns/capture.py) and those that the vendors'
# clients put in their place.
_CONTEXT_FULL = (
    "prompt is too long",
    "context_length_exceeded",
    "context window",
    "contextwindowexceeded",
    "maximum context length",
)
_ANSWER_FULL = (
    "output token maximum",
)  # answer after answer was cut off at its limit: the policy's doing, like a full context
_TURN_LIMIT = ("turn limit", "turn_limit", "error_max_turns", "limitsexceeded", "max_turns")


async def last_output(box: Sandbox, attempt: int) -> bytes:
    """The end of what the program printed; enough for its closing event."""
    found = await box.exec(f"tail -c {_TAIL_BYTES} {launcher.output_path(attempt)}", user="root", check=False)
    return found.stdout.encode()


def exit_of_error(words: str) -> AgentExit:
    """An error that the program reports about its model calls. All but the two limits are ours: `starved`."""
    lower = words.lower()
    if any(sign in lower for sign in (*_CONTEXT_FULL, *_ANSWER_FULL)):
        return AgentExit.CONTEXT_FULL
    return AgentExit.TURN_LIMIT if any(sign in lower for sign in _TURN_LIMIT) else AgentExit.STARVED
