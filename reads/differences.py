"""The first difference between two conversations about one task."""

from collections.abc import Sequence
from dataclasses import dataclass

from reads.conversation import MessageView, TurnView

_CONTEXT_CHARS = 30


@dataclass(slots=True, frozen=True)
class FirstDifference:
    """`turn_id`: of the second conversation. `what`: the answer or the messages (what tools returned).

    `text` begins shortly before the place in which the second conversation differs; `at` is its place in `text`.
    """

    turn_id: int
    number: int
    what: str
    text: str
    at: int


def first_difference(first: Sequence[TurnView], second: Sequence[TurnView]) -> FirstDifference | None:
    """Compare turn by turn, messages before answers; None if neither is known to differ."""
    for one, other in zip(first, second, strict=False):
        ours = "\n".join(message_text(message) for message in one.messages)
        theirs = "\n".join(message_text(message) for message in other.messages)
        if ours != theirs:
            return _difference(other, "messages", ours, theirs)
        ours = message_text(one.answer) if one.answer else ""
        theirs = message_text(other.answer) if other.answer else ""
        if ours != theirs:
            return _difference(other, "answer", ours, theirs)
    return None


def message_text(message: MessageView) -> str:
    """Return what a message says and does, without ids."""
    uses = [f"{one.name}: {one.body or one.title}" for one in message.tool_uses]
    return "\n".join(part for part in (message.reasoning, message.text, *uses) if part)


def _difference(turn: TurnView, what: str, ours: str, theirs: str) -> FirstDifference:
    at = next(
        (index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )
    start = max(0, at - _CONTEXT_CHARS)
    return FirstDifference(turn.id, turn.number, what, theirs[start : at + 4 * _CONTEXT_CHARS], at - start)
