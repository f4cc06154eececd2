"""The conversation as the agent saw it: per turn the new messages and the answer; and where two of one task differ."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ratchet.types import ForkCause
from reads.turns import TurnContent
from store.tool_uses import ToolUse, object_of, read_tool_uses

_FIRST_CALLS = (ForkCause.ROOT, ForkCause.SUB_AGENT)
"""Causes of turns whose whole history is new."""
_READ = ("messages", "answer")
"""Fields of a turn's content that its view has in another form."""


@dataclass(slots=True, frozen=True)
class MessageView:
    """A message. `result_of`: the tool call whose result it is, None for other messages or if the call is not known."""

    role: str
    text: str
    reasoning: str
    tool_uses: list[ToolUse]
    result_of: ToolUse | None


@dataclass(slots=True, frozen=True)
class TurnView:
    """A turn. `resends_history`: its request does not continue a stored answer, so its messages are a whole history.

    `gap_seconds`: since the turn before in its lane was answered, in which the agent ran its tools.
    """

    id: int
    number: int
    attempt: int
    lane: str
    kind: str
    state: str
    fork_cause: str | None
    prompt_tokens: int
    num_sampled: int
    finish_reason: str | None
    unread_call: str | None
    seconds: float | None
    gap_seconds: float | None
    resends_history: bool
    system: str
    num_tools: int
    messages: list[MessageView]
    answer: MessageView | None


_COPIED = [one.name for one in fields(TurnContent) if one.name in TurnView.__slots__ and one.name not in _READ]


def read_conversation(contents: Sequence[TurnContent], first_number: int = 1) -> list[TurnView]:
    """Return the turns with their tool calls read; results find the calls of the turns given here."""
    calls: dict[str, ToolUse] = {}
    answered_at: dict[tuple[int, str], Any] = {}
    views = []
    for number, turn in enumerate(contents, first_number):
        messages = [_message(object_of(one), calls) for one in turn.messages]
        answer = _message(turn.answer, calls) if turn.answer is not None else None
        before = answered_at.get((turn.attempt, turn.lane))
        seconds = (turn.completed_at - turn.created_at).total_seconds() if turn.completed_at else None
        copied = {name: getattr(turn, name) for name in _COPIED}
        views.append(
            TurnView(
                **copied,
                number=number,
                seconds=seconds,
                gap_seconds=(turn.created_at - before).total_seconds() if before else None,
                resends_history=turn.after is None and turn.fork_cause not in _FIRST_CALLS,
                messages=messages,
                answer=answer,
            )
        )
        if turn.completed_at:
            answered_at[turn.attempt, turn.lane] = turn.completed_at
    return views


def main_command(content: TurnContent) -> str:
    """Return the title of the first tool call of a turn's answer, else the beginning of its text."""
    if content.answer is None:
        return ""
    answer = _message(content.answer, {})
    if answer.tool_uses:
        return answer.tool_uses[0].title or answer.tool_uses[0].name
    return " ".join(answer.text.split())


def _message(value: dict[str, Any], calls: dict[str, ToolUse]) -> MessageView:
    uses = read_tool_uses(value)
    calls |= {one.call_id: one for one in uses}
    content = value.get("content")
    return MessageView(
        role=str(value.get("role") or ""),
        text=content if isinstance(content, str) else "" if content is None else str(content),
        reasoning=str(value.get("reasoning_content") or ""),
        tool_uses=uses,
        result_of=calls.get(str(value.get("tool_call_id") or "")),
    )


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
