"""Refuse histories that the vendors refuse.

Agents are written against vendors that answer these with an error; a chat template would silently render nonsense from
them.
"""

from collections.abc import Sequence

from adapter.conversation import MessageRun
from adapter.dialects.base import InvalidRequestError


def validate_history(runs: Sequence[MessageRun], num_skipped: int) -> None:
    """Check `runs`; the `num_skipped` before them were checked already. Raises InvalidRequestError."""
    if not num_skipped and runs[0].assistant:
        raise InvalidRequestError("the first message must not be the assistant's")
    if runs[-1].assistant:
        raise InvalidRequestError(
            "this model does not continue an assistant's message: the last message must be a user's or a tool's"
        )
    call_ids: set[str] | None = set() if not num_skipped else None
    for run in runs:
        if run.assistant:
            call_ids = _call_ids(run)
        else:
            _check_results(run, call_ids)


def refuse_media(runs: Sequence[MessageRun]) -> None:
    """Raise InvalidRequestError if one of the messages has an image or another file that the model cannot read."""
    number = sum(message.num_omitted for run in runs for message in run.messages)
    if number:
        raise InvalidRequestError(
            f"this run refuses images and files, and the conversation has {number}: send text only, or run with "
            "engine.images: placeholder"
        )


def _call_ids(run: MessageRun) -> set[str]:
    ids = [call.id for call in run.messages[0].tool_calls]
    repeated = next((one for one in ids if ids.count(one) > 1), None)
    if repeated is not None:
        raise InvalidRequestError(f"tool call ids must be unique: {repeated!r} is used twice")
    return set(ids)


def _check_results(run: MessageRun, call_ids: set[str] | None) -> None:
    """Check tool results. `call_ids`: of the answer before the run; None if it was parsed with an earlier request."""
    answered: set[str] = set()
    for message in run.messages:
        if message.role != "tool":
            continue
        if call_ids is not None and message.tool_call_id not in call_ids:
            raise InvalidRequestError(
                f"the tool result {message.tool_call_id!r} has no corresponding tool call in the message before it"
            )
        if message.tool_call_id in answered:
            raise InvalidRequestError(f"the tool call {message.tool_call_id!r} has two results")
        answered.add(message.tool_call_id)
