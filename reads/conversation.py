"""The conversation as the agent saw it: per turn the new messages and the answer; where two of one task differ; and
the last calls before an empty patch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import ForkCause
from reads.turns import TurnContent, TurnFields, read_turn_contents
from store.rollout_words import UNREADABLE
from store.tool_uses import ToolUse, object_of, read_tool_uses

_FIRST_CALLS = (ForkCause.ROOT, ForkCause.SUB_AGENT)
"""Causes of turns whose whole history is new."""
_MAX_TURNS = 500
_NUM_CALLS = 3
_MAX_CHARS = 80


@dataclass(slots=True, frozen=True)
class MessageView:
    """A message. `result_of`: the tool call whose result it is, None for other messages or if the call is not known."""

    role: str
    text: str
    reasoning: str
    tool_uses: list[ToolUse]
    result_of: ToolUse | None


@dataclass(slots=True, frozen=True)
class TurnView(TurnFields):
    """A turn. `resends_history`: its request does not continue a stored answer, so its messages are a whole history.

    `gap_seconds`: since the turn before in its lane was answered, in which the agent ran its tools.
    """

    number: int
    seconds: float | None
    gap_seconds: float | None
    resends_history: bool
    system: str
    num_tools: int
    messages: list[MessageView]
    answer: MessageView | None


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
        views.append(
            TurnView(
                **{name: getattr(turn, name) for name in TurnFields.__match_args__},
                number=number,
                seconds=seconds,
                gap_seconds=(turn.created_at - before).total_seconds() if before else None,
                resends_history=turn.after is None and turn.fork_cause not in _FIRST_CALLS,
                system=turn.system,
                num_tools=turn.num_tools,
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
