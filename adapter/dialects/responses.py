"""OpenAI Responses, the protocol of Codex. Stateless: the client sends the whole history, reasoning included.

Thinking is sent as a reasoning item, as text and once more as `encrypted_content`, which is what clients send back.
Custom tools, which take plain text, are shown to the model as functions with one parameter `input`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import orjson

from adapter.conversation import Answer, Message, Preamble, RequestOptions, ToolCall
from adapter.dialects.base import (
    CallIds,
    Dialect,
    Failure,
    Fields,
    HttpFailure,
    InvalidRequestError,
    PreambleContent,
    SseWriter,
    StateNotKeptError,
    assistant_message,
    call_item,
    called,
    common_options,
    field_at,
    field_of,
    object_at,
    role_of,
)
from adapter.dialects.chat import openai_failure
from adapter.dialects.fields import RESPONSES_FIELDS, FieldRule
from adapter.dialects.media import Content, Omitted, content_of, omitted_file, omitted_image
from adapter.dialects.responses_stream import ResponsesStream, response_of, unsealed_thinking
from adapter.dialects.responses_tools import called_name, forms_of, namespaces_text, tools_of
from adapter.dialects.tool_choice import responses_choice
from adapter.structured_output import schema_of

_CALL_TYPES = frozenset({"function_call", "custom_tool_call"})
_ANSWER_TYPES = _CALL_TYPES | {"reasoning"}
_RESULT_TYPES = frozenset({"function_call_output", "custom_tool_call_output"})
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "refusal"})


class ResponsesDialect(Dialect):
    name = "responses"
    rules: Mapping[str, FieldRule] = RESPONSES_FIELDS
    history = "input"
    preamble_fields: tuple[str, ...] = ("instructions", "tools")
    too_long_in_stream = True

    def items(self, history: msgspec.Raw | None) -> list[msgspec.Raw]:
        """A string instead of a list is one message of the user's."""
        if history is not None and bytes(memoryview(history)[:1]) == b'"':
            text = msgspec.json.decode(history, type=str)
            return [msgspec.Raw(orjson.dumps({"type": "message", "role": "user", "content": text}))]
        return super().items(history)

    def is_answer(self, item: msgspec.Raw) -> bool:
        found = role_of(item)
        return found.role == "assistant" or (isinstance(found.type, str) and found.type in _ANSWER_TYPES)

    def call_ids(self, item: msgspec.Raw) -> CallIds:
        found = call_item(item)
        if found.type in _RESULT_TYPES:
            return CallIds(answered=found.call_id or "")
        return CallIds((found.call_id,)) if found.type in _CALL_TYPES and found.call_id else CallIds()

    def preamble(self, fields: Fields) -> PreambleContent:
        entries = [object_at(value, f"tools[{at}]") for at, value in enumerate(field_at(fields, "tools", list, []))]
        tools = [tool for at, entry in enumerate(entries) for tool in tools_of(entry, f"tools[{at}]")]
        texts = [field_at(fields, "instructions", str, ""), namespaces_text(entries)]
        functions = [tool.function for tool in tools]
        return PreambleContent("\n\n".join(filter(None, texts)), functions, forms_of(tools))

    def messages(self, items: Sequence[Any], first: int) -> list[Message]:
        return [
            _message(object_at(value, f"input[{at}]"), f"input[{at}]") for at, value in enumerate(items, start=first)
        ]

    def options(self, fields: Fields, headers: Mapping[str, str], preamble: Preamble) -> RequestOptions:
        text = field_at(fields, "text", dict, {})
        lane = _lane(headers)
        return replace(
            common_options(self.name, fields, headers, lane, "max_output_tokens"),
            tool_choice=responses_choice(field_at(fields, "tool_choice", (str, dict), "auto"), preamble),
            parallel_calls=field_at(fields, "parallel_tool_calls", bool, True),
            logprobs="message.output_text.logprobs" in field_at(fields, "include", list, []),
            output_schema=schema_of(field_of(text, "format", dict, {}), "text.format"),
        )

    def reply(self, options: RequestOptions, answer: Answer) -> bytes:
        return orjson.dumps(response_of(options, f"resp_{answer.turn_id}", answer))

    def stream(self, options: RequestOptions) -> SseWriter:
        return ResponsesStream(options)

    def failure(self, failure: Failure, message: str) -> HttpFailure:
        return openai_failure(failure, message)


def _lane(headers: Mapping[str, str]) -> str:
    """Codex names the kind of a sub-agent and its thread; older versions have a session for each sub-agent instead."""
    sub_agent = headers.get("x-openai-subagent", "")
    names = (headers.get(name, "") for name in ("thread-id", "session_id", "session-id"))
    return f"{sub_agent}/{next(filter(None, names), '')}" if sub_agent else ""


def _message(item: dict[str, Any], where: str) -> Message:
    kind = str(item.get("type") or "message")
    if kind == "message":
        return _plain(item, where)
    if kind == "reasoning":
        return Message("assistant", "", _reasoning(item, where))
    call_id = field_of(item, "call_id", str, "", where)
    if kind == "function_call":
        return assistant_message("", "", [called(call_id, called_name(item), item.get("arguments"))])
    if kind == "custom_tool_call":
        arguments = {"input": field_of(item, "input", str, "", where)}
        return Message("assistant", "", tool_calls=(ToolCall(call_id, called_name(item), arguments),))
    if kind == "item_reference":
        raise StateNotKeptError(f"{where}: no item is kept here: send the item itself")
    if kind in _RESULT_TYPES:
        output = _content(field_of(item, "output", (str, list), "", where), f"{where}.output")
        return Message("tool", output.text, tool_call_id=call_id, num_omitted=output.num_omitted)
    raise InvalidRequestError(
        f"{where}.type: {kind!r} is none of message, reasoning, function_call, custom_tool_call and their outputs"
    )


def _plain(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(f"{where}.role: {role!r} is none of user, assistant, system, developer")
    parts = field_of(item, "content", (str, list), "", where)
    if role == "assistant" and isinstance(parts, list) and len(parts) > 1:  # how a violated format was reported
        parts = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "refusal")]
    content = _content(parts, f"{where}.content")
    return Message("system" if role == "developer" else role, content.text, num_omitted=content.num_omitted)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The item's thinking. What another service has sealed cannot be read, so its readable text stands for it."""
    if (unsealed := unsealed_thinking(item)) is not None:
        return unsealed
    parts = field_of(item, "content", list, [], where) or field_of(item, "summary", list, [], where)
    return "\n".join(str(object_at(part, where).get("text") or "") for part in parts)


def _content(content: str | list[Any], where: str) -> Content:
    return content_of(content, where, "\n", _part)


def _part(part: dict[str, Any], where: str) -> str | Omitted:
    kind = str(part.get("type"))
    if kind in _TEXT_TYPES:
        return str(part.get("text") or part.get("refusal") or "")
    if kind in ("input_image", "computer_screenshot"):
        return omitted_image(part.get("image_url"))
    if kind == "input_file":
        return omitted_file("file", part.get("filename"))
    if kind == "input_audio":
        return omitted_file("audio", field_of(part, "input_audio", dict, {}, where).get("format"))
    raise InvalidRequestError(f"{where}: {kind!r} is none of input_text, output_text, input_image, input_file")
