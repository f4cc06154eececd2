"""An answer as OpenAI's response object, and as the events of a stream that build it up."""

import base64
from typing import Any
from uuid import uuid4

import orjson

from adapter.conversation import Answer, RequestOptions
from adapter.dialects.base import Failure, event

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
        "tool_choice": options.tool_choice if options.tool_choice in ("auto", "none", "required") else "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None if answer is None else _usage(answer),
    }


def output_of(options: RequestOptions, answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, text and calls, in this order; their ids are derived from the turn's."""
    message = answer.message
    turn = answer.turn_id
    forms = options.tool_forms
    items: list[dict[str, Any]] = []
    if message.reasoning:
        sealed = base64.b64encode(message.reasoning.encode()).decode()
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append(
            {"id": f"rs_{turn}", "type": "reasoning", "summary": [], "content": content, "encrypted_content": sealed}
        )
    if message.text or not message.tool_calls:
        logprobs = [one._asdict() | {"bytes": list(one.token.encode()), "top_logprobs": []} for one in answer.logprobs]
        parts: list[dict[str, Any]] = [
            {"type": "output_text", "text": message.text, "annotations": [], "logprobs": logprobs}
        ]
        if answer.violation is not None:
            parts.append({"type": "refusal", "refusal": answer.violation})
        items.append(
            {"id": f"msg_{turn}", "type": "message", "role": "assistant", "status": "completed", "content": parts}
        )
    for at, call in enumerate(message.tool_calls):
        common = {"call_id": call.id, "name": call.name, "status": "completed"}
        if (qualified := forms.namespaces.get(call.name)) is not None:
            common |= {"name": qualified.name, "namespace": qualified.namespace}
        if call.name in forms.custom:
            items.append(
                {"id": f"ctc_{turn}_{at}", "type": "custom_tool_call"}
                | common
                | {"input": str(call.arguments.get("input", ""))}
            )
        else:
            arguments = orjson.dumps(call.arguments).decode()
            items.append({"id": f"fc_{turn}_{at}", "type": "function_call"} | common | {"arguments": arguments})
    return items


class ResponsesStream:
    def __init__(self, options: RequestOptions) -> None:
        self._options = options
        self._id = f"resp_{uuid4().hex}"
        self._next_number = 0

    def opening(self, prompt_tokens: int) -> bytes:
        return self._event("response.created", response=self._response(None)) + self.ping()

    def ping(self) -> bytes:
        """An event and not a comment, because some clients time out without events."""
        return self._event("response.in_progress", response=self._response(None))

    def closing(self, answer: Answer) -> bytes:
        items = output_of(self._options, answer)
        events = [self._item(at, item) for at, item in enumerate(items)]
        end = "response.incomplete" if answer.finish == "length" else "response.completed"
        return b"".join(events) + self._event(end, response=self._response(answer))

    def failed(self, failure: Failure, message: str) -> bytes:
        error = {"code": _ERROR_CODE.get(failure, "server_error"), "message": message}
        return self._event("response.failed", response=response_of(self._options, self._id, None, error))

    def _response(self, answer: Answer | None) -> dict[str, Any]:
        return response_of(self._options, self._id, answer)

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._next_number
        self._next_number += 1
        return event({"type": kind, "sequence_number": number} | values, kind)

    def _item(self, at: int, item: dict[str, Any]) -> bytes:
        """The events of one output item: added empty, filled, done."""
        place = {"output_index": at, "item_id": item["id"]}
        empty = {**item, **_EMPTY[item["type"]]} | ({"status": "in_progress"} if "status" in item else {})
        parts = self._event("response.output_item.added", output_index=at, item=empty)
        if item["type"] in ("message", "reasoning"):
            for number, part in enumerate(item["content"]):
                parts += self._part(place | {"content_index": number}, part)
        elif item["type"] == "function_call":
            parts += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            parts += self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            parts += self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            parts += self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        return parts + self._event("response.output_item.done", output_index=at, item=item)

    def _part(self, place: dict[str, Any], part: dict[str, Any]) -> bytes:
        name = part["type"]
        key = "refusal" if name == "refusal" else "text"
        text = part[key]
        extra = {"logprobs": part["logprobs"]} if name == "output_text" else {}
        parts = self._event("response.content_part.added", **place, part=part | {key: ""})
        if text:
            parts += self._event(f"response.{name}.delta", **place, delta=text, **extra)
        parts += self._event(f"response.{name}.done", **place, **{key: text}, **extra)
        return parts + self._event("response.content_part.done", **place, part=part)


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
