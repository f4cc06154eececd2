"""An answer as OpenAI's response object, and as the events of a stream that build it up."""

import base64
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import orjson

from adapter.conversation import Answer, RequestOptions, ShownText, ToolCall
from adapter.dialects.base import Failure, event

_SEAL = "ratchet:"
"""The colon is in no base64, so no seal of another service begins with it."""
_ERROR_CODE = {Failure.PROMPT_TOO_LONG: "context_length_exceeded", Failure.INVALID: "invalid_prompt"}


def response_of(
    options: RequestOptions, response_id: str, answer: Answer | None, error: dict[str, str] | None = None
) -> dict[str, Any]:
    """The response object; without `answer`, as it is while the model generates."""
    cut = answer is not None and answer.finish == "length"
    status = "failed" if error else "in_progress" if answer is None else "incomplete" if cut else "completed"
    return {
        "id": response_id,
        "object": "response",
        "created_at": answer.created if answer else 0,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": options.max_tokens,
        "metadata": {},
        "model": options.model,
        "output": [] if answer is None else output_of(options, answer),
        "parallel_tool_calls": options.parallel_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"} if options.output_schema is None else {"type": "json_object"}},
        "tool_choice": options.tool_choice.sent,
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None if answer is None else _usage(answer),
    }


def unsealed_thinking(item: Mapping[str, Any]) -> str | None:
    """The thinking in a reasoning item's `encrypted_content`; None if this service did not make it."""
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except ValueError:  # no base64, no ASCII, or no text
        return None


def reasoning_item(turn_id: int, thinking: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": thinking}]
    item = {"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": content}
    return item | {"encrypted_content": _SEAL + base64.b64encode(thinking.encode()).decode()}


def message_item(turn_id: int, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "status": "completed"}
    return item | {"content": [part]}


def output_of(options: RequestOptions, answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, text and calls, in this order; their ids are derived from the turn's."""
    message = answer.message
    turn = answer.turn_id
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(reasoning_item(turn, message.reasoning))
    if message.text or not message.tool_calls:
        item = message_item(turn, message.text)
        item["content"][0]["logprobs"] = [
            one._asdict() | {"bytes": list(one.token.encode()), "top_logprobs": []} for one in answer.logprobs
        ]
        if answer.violation is not None:
            item["content"].append({"type": "refusal", "refusal": answer.violation})
        items.append(item)
    return items + [call_item(options, turn, at, call) for at, call in enumerate(message.tool_calls)]


def call_item(options: RequestOptions, turn_id: int, at: int, call: ToolCall) -> dict[str, Any]:
    """The answer's call number `at`."""
    forms = options.tool_forms
    common = {"call_id": call.id, "name": call.name, "status": "completed"}
    if (qualified := forms.namespaces.get(call.name)) is not None:
        common |= {"name": qualified.name, "namespace": qualified.namespace}
    if call.name in forms.custom:
        text = str(call.arguments.get("input", ""))
        return {"id": f"ctc_{turn_id}_{at}", "type": "custom_tool_call"} | common | {"input": text}
    arguments = orjson.dumps(call.arguments).decode()
    return {"id": f"fc_{turn_id}_{at}", "type": "function_call"} | common | {"arguments": arguments}


class ResponsesStream:
    def __init__(self, options: RequestOptions) -> None:
        self.shown = ShownText()
        self._options = options
        self._id = f"resp_{uuid4().hex}"
        self._next_number = 0
        self._num_items = 0
        self._open_item = ""  # type of the last item of text if it is not complete

    def opening(self, prompt_tokens: int) -> bytes:
        return self._event("response.created", response=self._response(None)) + self.ping()

    def ping(self) -> bytes:
        """An event and not a comment, because some clients time out without events."""
        return self._event("response.in_progress", response=self._response(None))

    def growth(self, turn_id: int, grown: ShownText) -> bytes:
        events = b""
        if new := grown.thinking[len(self.shown.thinking) :]:
            # Not of all the thinking, which would be encoded with every update: the item is complete at its end.
            events += self._grow(reasoning_item(turn_id, ""), new)
        if new := grown.text[len(self.shown.text) :]:
            if self._open_item == "reasoning":
                events += self._end_item(reasoning_item(turn_id, grown.thinking))
            events += self._grow(message_item(turn_id, ""), new)
        self.shown = grown
        return events

    def closing(self, answer: Answer) -> bytes:
        items = output_of(self._options, answer)
        events = b"".join(self._call(item) if item["type"] in _CALL_EVENT else self._complete(item) for item in items)
        end = "response.incomplete" if answer.finish == "length" else "response.completed"
        return events + self._event(end, response=self._response(answer))

    def failed(self, failure: Failure, message: str) -> bytes:
        error = {"code": _ERROR_CODE.get(failure, "server_error"), "message": message}
        return self._event("response.failed", response=response_of(self._options, self._id, None, error))

    def _response(self, answer: Answer | None) -> dict[str, Any]:
        return response_of(self._options, self._id, answer)

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._next_number
        self._next_number += 1
        return event({"type": kind, "sequence_number": number} | values, kind)

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        empty = {**item, **_EMPTY[item["type"]]} | ({"status": "in_progress"} if "status" in item else {})
        self._num_items += 1
        return self._event("response.output_item.added", output_index=self._num_items - 1, item=empty)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        """The place of the item that was begun last."""
        return {"output_index": self._num_items - 1, "item_id": item["id"]}

    def _call(self, item: dict[str, Any]) -> bytes:
        """The events of a call, which is added empty and then filled."""
        kind = _CALL_EVENT[item["type"]]
        ((field, _),) = _EMPTY[item["type"]].items()
        events = self._begin_item(item)
        if item[field]:
            events += self._event(f"{kind}.delta", **self._place(item), delta=item[field])
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        events += self._event(f"{kind}.done", **self._place(item), **named, **{field: item[field]})
        return events + self._event("response.output_item.done", output_index=self._num_items - 1, item=item)

    def _grow(self, item: dict[str, Any], new: str) -> bytes:
        """The events that append `new` to the text of an item, which is begun if it is not open."""
        part = item["content"][0]
        events = b""
        if self._open_item != item["type"]:
            self._open_item = item["type"]
            events += self._begin_item(item)
            events += self._part_event("added", item, 0, part=_emptied(part))
        return events + self._delta(item, 0, part, new)

    def _complete(self, item: dict[str, Any]) -> bytes:
        """The events of what is not shown yet of a text or of thinking, and of its end."""
        whole = item["content"][0]["text"]
        seen = self.shown.thinking if item["type"] == "reasoning" else self.shown.text
        if seen and self._open_item != item["type"]:
            return b""  # it ended before the next item began
        return self._grow(item, whole[len(seen) :]) + self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        self._open_item = ""
        events = b""
        for number, part in enumerate(item["content"]):
            if number:  # a refusal
                events += self._part_event("added", item, number, part=_emptied(part))
                events += self._delta(item, number, part, part["refusal"])
            text = {key: part[key] for key in ("text", "refusal", "logprobs") if key in part}
            place = self._place(item) | {"content_index": number}
            events += self._event(f"response.{part['type']}.done", **place, **text)
            events += self._part_event("done", item, number, part=part)
        return events + self._event("response.output_item.done", output_index=self._num_items - 1, item=item)

    def _part_event(self, name: str, item: dict[str, Any], number: int, part: dict[str, Any]) -> bytes:
        return self._event(f"response.content_part.{name}", **self._place(item), content_index=number, part=part)

    def _delta(self, item: dict[str, Any], number: int, part: dict[str, Any], new: str) -> bytes:
        """A delta; the logprobs of all sampled tokens are in the part that is done, since no delta has one's own."""
        if not new:
            return b""
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        place = self._place(item) | {"content_index": number}
        return self._event(f"response.{part['type']}.delta", **place, delta=new, **logprobs)


def _emptied(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"refusal" if part["type"] == "refusal" else "text": ""}


_CALL_EVENT = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "reasoning": {"content": [], "encrypted_content": None},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
