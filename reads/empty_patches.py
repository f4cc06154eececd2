"""The last calls of an attempt that left an empty patch, and what they returned."""

from collections.abc import Sequence
from contextlib import suppress

from sqlalchemy.ext.asyncio import AsyncConnection

from reads.conversation import TurnView, read_conversation
from reads.turns import read_turn_contents
from store.rollout_words import UNREADABLE

_MAX_TURNS = 500
_NUM_CALLS = 3
_MAX_CHARS = 80


async def explain_empty_patch(connection: AsyncConnection, rollout_id: int, attempt: int) -> str:
    """Return the attempt's last calls as a clause; empty if a turn is damaged or there are too many."""
    with suppress(*UNREADABLE):
        contents = await read_turn_contents(connection, rollout_id, _MAX_TURNS)
        turns = [one for one in read_conversation(contents) if one.attempt == attempt]
        return last_calls(turns) if turns and len(contents) < _MAX_TURNS else ""
    return ""


def last_calls(turns: Sequence[TurnView]) -> str:
    """Return a clause with the last calls of these turns, all of an attempt, and the first line of each result."""
    uses = [use for turn in turns if turn.answer for use in turn.answer.tool_uses]
    if not uses:
        return "it made no tool call"
    results = {one.result_of.call_id: one.text for turn in turns for one in turn.messages if one.result_of}
    told = []
    for use in uses[-_NUM_CALLS:]:
        call = use.title if use.kind == "shell" else f"{use.name} {use.title}".strip()
        result = results.get(use.call_id)
        gave = "was not answered" if result is None else f"gave {_short(result) or 'nothing'}"
        told.append(f"`{_short(call)}` {gave}")
    number = f"the last {len(told)} of {len(uses)}" if len(uses) > len(told) else str(len(told))
    return f"its calls, {number}: {'; '.join(told)}"


def _short(text: str) -> str:
    line = next((one.strip() for one in text.splitlines() if one.strip()), "")
    return line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]}…"
