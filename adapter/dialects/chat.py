"""OpenAI Chat Completions, the protocol of `bash_agent` and most open agents.

Thinking is sent and accepted as `reasoning_content`, as by other open servers.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import orjson

from adapter.conversation import (
    Answer,
    Message,
    Preamble,
    RequestOptions,
    ShownText,
    Tool,
    ToolCall,
    ToolForms,
    UnreadCall,
)
from adapter.dialects.base import (
    CallIds,
    Dialect,
    Failure,
    Fields,
    HttpFailure,
    InvalidRequestError,
    PreambleContent,
    assistant_message,
    call_item,
    called,
    common_options,
    event,
    field_at,
    field_of,
    object_at,
    stops_of,
)
from adapter.dialects.fields import CHAT_FIELDS, FieldRule
from adapter.dialects.function_tools import function_tool, text_tool
from adapter.dialects.media import Content, Omitted, content_of, omitted_file, omitted_image
from adapter.dialects.tool_choice import chat_choice
from adapter.structured_output import schema_of

_PARAM = re.compile(r"invalid request: ([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*): ")


class OpenAIError(NamedTuple):
    status: int
    type: str
    code: str | None


OPENAI_ERRORS: dict[Failure, OpenAIError] = {
    Failure.INVALID: OpenAIError(400, "invalid_request_error", None),
    Failure.STATE_NOT_KEPT: OpenAIError(400, "invalid_request_error", "unsupported_parameter"),
    Failure.UNKNOWN_ROUTE: OpenAIError(404, "invalid_request_error", "unknown_url"),
    Failure.PROMPT_TOO_LONG: OpenAIError(400, "invalid_request_error", "context_length_exceeded"),
    Failure.TOO_LARGE: OpenAIError(413, "invalid_request_error", "request_too_large"),
    Failure.TIMED_OUT: OpenAIError(408, "invalid_request_error", "request_timeout"),
    Failure.UNAUTHORISED: OpenAIError(401, "invalid_request_error", "invalid_api_key"),
    Failure.UNKNOWN_MODEL: OpenAIError(404, "invalid_request_error", "model_not_found"),
    Failure.TURN_LIMIT: OpenAIError(403, "invalid_request_error", "turn_limit_reached"),
    Failure.UNAVAILABLE: OpenAIError(503, "server_error", "unavailable"),
    Failure.INTERNAL: OpenAIError(500, "server_error", None),
}


class ChatDialect(Dialect):
    name = "chat"
    rules: Mapping[str, FieldRule] = CHAT_FIELDS
    history = "messages"
    preamble_fields: tuple[str, ...] = ("tools",)
    too_long_in_stream = False

    def call_ids(self, item: msgspec.Raw) -> CallIds:
        found = call_item(item)
        if found.role == "tool":
            return CallIds(answered=found.tool_call_id or "")
        return CallIds(tuple(call.id for call in found.tool_calls or ()), has_text=bool(found.content))

    def preamble(self, fields: Fields) -> PreambleContent:
        values = field_at(fields, "tools", list, [])
        tools = [_tool(object_at(value, f"tools[{at}]"), f"tools[{at}]") for at, value in enumerate(values)]
        return PreambleContent("", tools, ToolForms(_names(values, "function", strict=True), _names(values, "custom")))

    def messages(self, items: Sequence[Any], first: int) -> list[Message]:
        return [
            _message(object_at(value, f"messages[{at}]"), f"messages[{at}]")
            for at, value in enumerate(items, start=first)
        ]

    def options(self, fields: Fields, headers: Mapping[str, str], preamble: Preamble) -> RequestOptions:
        name = "max_tokens" if field_at(fields, "max_completion_tokens", int) is None else "max_completion_tokens"
        lane = _lane(headers)
        return replace(
            common_options(self.name, fields, headers, lane, name),
            include_usage=bool(field_at(fields, "stream_options", dict, {}).get("include_usage")),
            stop_sequences=stops_of(field_at(fields, "stop", (str, list), []), "stop"),
            tool_choice=chat_choice(field_at(fields, "tool_choice", (str, dict), "auto"), preamble),
            parallel_calls=field_at(fields, "parallel_tool_calls", bool, True),
            logprobs=field_at(fields, "logprobs", bool, False),
            output_schema=schema_of(field_at(fields, "response_format", dict, {}), "response_format"),
        )

    def reply(self, options: RequestOptions, answer: Answer) -> bytes:
        choice = {
            "index": 0,
            "message": _wire_message(answer, options),
            "logprobs": _logprobs(answer),
            "finish_reason": _finish(answer),
        }
        frame = _frame(options, f"chatcmpl-{answer.turn_id}", answer.created, "chat.completion")
        return orjson.dumps(frame | {"choices": [choice], "usage": _usage(answer)})

    def stream(self, options: RequestOptions) -> "ChatStream":
        return ChatStream(options)

    def failure(self, failure: Failure, message: str) -> HttpFailure:
        return openai_failure(failure, message)


class ChatStream:
    def __init__(self, options: RequestOptions) -> None:
        self.shown = ShownText()
        self._options = options
        self._frame = _frame(options, f"chatcmpl-{uuid4().hex[:24]}", int(time.time()), "chat.completion.chunk")
        self._has_role = False

    def opening(self, prompt_tokens: int) -> bytes:
        return self.ping()

    def ping(self) -> bytes:
        return b": ping\n\n"

    def growth(self, turn_id: int, grown: ShownText) -> bytes:
        chunks = b""
        if new := grown.thinking[len(self.shown.thinking) :]:
            chunks += self._chunk({"reasoning_content": new})
        if new := grown.text[len(self.shown.text) :]:
            chunks += self._chunk({"content": new})
        self.shown = grown
        return chunks

    def closing(self, answer: Answer) -> bytes:
        chunks = self.growth(answer.turn_id, ShownText(answer.message.reasoning, answer.message.text))
        for at, call in enumerate(answer.message.tool_calls):
            chunks += self._chunk({"tool_calls": [{"index": at} | _wire_call(call, self._options)]})
        if answer.violation:
            chunks += self._chunk({"refusal": answer.violation})
        # All logprobs are in the last chunk: they are those of all sampled tokens, not of one delta's.
        chunks += self._chunk({}, _logprobs(answer), _finish(answer))
        if self._options.include_usage:
            chunks += event(self._frame | {"choices": [], "usage": _usage(answer)})
        return chunks + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None) -> bytes:
        """One delta; before the first one, the delta with the role."""
        role = b""
        if not self._has_role:
            self._has_role = True
            role = self._chunk({"role": "assistant", "content": ""})
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return role + event(self._frame | {"choices": [choice]})

    def failed(self, failure: Failure, message: str) -> bytes:
        return b"data: " + openai_failure(failure, message).body + b"\n\n"


def _lane(headers: Mapping[str, str]) -> str:
    """Claude Code names its sub-agents; OpenCode names the session of each, and of its parent."""
    if headers.get("x-parent-session-id"):
        return headers.get("x-session-id", "")
    return headers.get("x-claude-code-agent-id", "")


def _message(value: dict[str, Any], where: str) -> Message:
    role = value.get("role")
    if role == "assistant":
        if value.get("function_call") is not None:
            raise InvalidRequestError(f"{where}.function_call: use tool_calls")
        if value.get("audio") is not None:
            raise InvalidRequestError(f"{where}.audio: no answer is kept here: send its text as content")
        reasoning = field_of(value, "reasoning_content", str, "", where)
        calls = [
            _tool_call(object_at(one, f"{where}.tool_calls[{at}]"), f"{where}.tool_calls[{at}]")
            for at, one in enumerate(field_of(value, "tool_calls", list, [], where))
        ]
        return assistant_message(_content(value, where, "").text, reasoning, calls)
    if role == "tool":
        content = _content(value, where, "\n")
        call_id = field_of(value, "tool_call_id", str, "", where)
        return Message("tool", content.text, tool_call_id=call_id, num_omitted=content.num_omitted)
    if role in ("system", "developer", "user"):
        if value.get("content") is None:
            raise InvalidRequestError(f"{where}.content: text expected, got null")
        content = _content(value, where, "\n")
        return Message("user" if role == "user" else "system", content.text, num_omitted=content.num_omitted)
    raise InvalidRequestError(f"{where}.role: {role!r} is none of system, developer, user, assistant, tool")


def _content(value: dict[str, Any], where: str, joint: str) -> Content:
    return content_of(field_of(value, "content", (str, list), "", where), f"{where}.content", joint, _part)


def _part(part: dict[str, Any], where: str) -> str | Omitted:
    match part.get("type"):
        case "text" | "refusal" as kind:
            return str(part.get(kind) or "")
        case "image_url":
            image = field_of(part, "image_url", (dict, str), {}, where)
            return omitted_image(image if isinstance(image, str) else image.get("url"))
        case "input_audio":
            return omitted_file("audio", field_of(part, "input_audio", dict, {}, where).get("format"))
        case "file":
            return omitted_file("file", field_of(part, "file", dict, {}, where).get("filename"))
    raise InvalidRequestError(f"{where}: {part.get('type')!r} is none of text, refusal, image_url, input_audio, file")


def _tool_call(value: dict[str, Any], where: str) -> ToolCall | UnreadCall:
    if value.get("type") == "custom":
        custom = object_at(value.get("custom"), f"{where}.custom")
        return ToolCall(str(value.get("id") or ""), str(custom.get("name") or ""), {"input": custom.get("input") or ""})
    function = object_at(value.get("function"), f"{where}.function")
    return called(value.get("id"), function.get("name"), function.get("arguments"))


def _tool(value: dict[str, Any], where: str) -> Tool:
    if value.get("type") == "custom":
        return text_tool(object_at(value.get("custom"), f"{where}.custom"), f"{where}.custom")
    function = object_at(value.get("function"), f"{where}.function")
    return function_tool(function, f"{where}.function")


def openai_failure(failure: Failure, message: str) -> HttpFailure:
    error = OPENAI_ERRORS[failure]
    value = {"message": message, "type": error.type, "param": _param(failure, message), "code": error.code}
    return HttpFailure(error.status, orjson.dumps({"error": value}))


def _param(failure: Failure, message: str) -> str | None:
    """The field that a refusal is about: its sentence begins with it."""
    if failure is Failure.UNKNOWN_MODEL:
        return "model"
    found = _PARAM.match(message) if failure in (Failure.INVALID, Failure.STATE_NOT_KEPT) else None
    return found[1] if found else None


def _names(tools: list[dict[str, Any]], kind: str, strict: bool = False) -> frozenset[str]:
    """The names of the tools of a type; only of those with a strict schema if `strict`."""
    shown = (tool[kind] for tool in tools if (tool.get("type") or "function") == kind)
    return frozenset(str(one["name"]) for one in shown if not strict or one.get("strict") is True)


def _finish(answer: Answer) -> str:
    return "stop" if answer.finish == "stop_sequence" else answer.finish


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    content = [one._asdict() | {"bytes": _bytes_of(one.token), "top_logprobs": []} for one in answer.logprobs]
    return {"content": content, "refusal": None}


def _bytes_of(token: str) -> list[int] | None:
    """None for a token that is part of a character."""
    return None if "\ufffd" in token else list(token.encode())


def _wire_call(call: ToolCall, options: RequestOptions) -> dict[str, Any]:
    if call.name in options.tool_forms.custom:
        custom = {"name": call.name, "input": str(call.arguments.get("input", ""))}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
    return {"id": call.id, "type": "function", "function": function}


def _wire_message(answer: Answer, options: RequestOptions) -> dict[str, Any]:
    message = answer.message
    wire: dict[str, Any] = {
        "role": "assistant",
        "content": message.text or (None if message.tool_calls else ""),
        "refusal": answer.violation,
    }
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_wire_call(call, options) for call in message.tool_calls]
    return wire


def _frame(options: RequestOptions, completion_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": created, "model": options.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }
