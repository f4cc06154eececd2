"""What the vendors refuse in a history, refused here in the same places.

Why here: agents are written against vendors that say so; a template would render nonsense from it without a word.
Called by: `prompts.py`.
"""

from collections.abc import Sequence

from adapter.conversation import MessageRun
from adapter.dialects.base import InvalidRequestError


def validate_history(units: Sequence[MessageRun], num_skipped: int) -> None:
    """`units` follow `num_skipped` that were checked before. Raises InvalidRequestError."""
    if not num_skipped and units[0].assistant:
        raise InvalidRequestError("the first message must not be the assistant's")
    if units[-1].assistant:
        raise InvalidRequestError(
            "this model does not continue an assistant's message: the last message must be a user's or a tool's"
        )
    called: set[str] | None = set() if not num_skipped else None
    for unit in units:
        if unit.assistant:
            called = _calls(unit)
        else:
            _check_results(unit, called)


def _calls(unit: MessageRun) -> set[str]:
    ids = [call.id for call in unit.messages[0].tool_calls]
    twice = next((one for one in ids if ids.count(one) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"tool call ids must be unique: {twice!r} is there twice")
    return set(ids)


def _check_results(unit: MessageRun, called: set[str] | None) -> None:
    """`called` None: the calls before were read with an earlier request."""
    answered: set[str] = set()
    for message in unit.messages:
        if message.role != "tool":
            continue
        if called is not None and message.tool_call_id not in called:
            raise InvalidRequestError(
                f"the tool result {message.tool_call_id!r} has no corresponding tool call in the message before it"
            )
        if message.tool_call_id in answered:
            raise InvalidRequestError(f"the tool call {message.tool_call_id!r} has two results")
        answered.add(message.tool_call_id)
