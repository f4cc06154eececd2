"""Anthropic Messages, the protocol of Claude Code. The run sets sampling, so fields for it or caching are ignored."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import orjson

from adapter.conversation import Answer, Message, Preamble, RequestOptions, ShownText, Tool, ToolForms
from adapter.dialects.base import (
    Dialect,
    Failure,
    Fields,
    HttpFailure,
    InvalidRequestError,
    PreambleContent,
    assistant_message,
    called,
    common_options,
    event,
    field_at,
    field_of,
    object_at,
    stops_of,
)
from adapter.dialects.fields import MESSAGES_FIELDS, FieldRule
from adapter.dialects.function_tools import function_tool
from adapter.dialects.media import Content, Omitted, content_of, omitted_file, omitted_image
from adapter.dialects.tool_choice import messages_choice
from adapter.structured_output import schema_of

_STATUS: dict[Failure, tuple[int, str]] = {
    Failure.INVALID: (400, "invalid_request_error"),
    Failure.STATE_NOT_KEPT: (400, "invalid_request_error"),
    Failure.UNKNOWN_ROUTE: (404, "not_found_error"),
    Failure.PROMPT_TOO_LONG: (400, "invalid_request_error"),
    Failure.TOO_LARGE: (413, "request_too_large"),
    Failure.TIMED_OUT: (408, "timeout_error"),
    Failure.UNAUTHORISED: (401, "authentication_error"),
    Failure.UNKNOWN_MODEL: (404, "not_found_error"),
    Failure.TURN_LIMIT: (403, "permission_error"),
    Failure.UNAVAILABLE: (529, "overloaded_error"),
    Failure.INTERNAL: (500, "api_error"),
}
_STOP_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_sequence": "stop_sequence"}
_RUN_BY_VENDOR = ("web_search", "web_fetch", "code_execution", "tool_search", "advisor", "mcp_toolset")
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)  # changes with every call
_SIGNATURE = "ratchet"
_PING = event({"type": "ping"}, "ping")


class MessagesDialect(Dialect):
    name = "messages"
    rules: Mapping[str, FieldRule] = MESSAGES_FIELDS
    history = "messages"
    preamble_fields: tuple[str, ...] = ("system", "tools")
    too_long_in_stream = False

    def preamble(self, fields: Fields) -> PreambleContent:
        system = _content(field_at(fields, "system", (str, list), ""), "system").text
        values = field_at(fields, "tools", list, [])
        tools = _tools(values)
        forms = ToolForms(
            strict=frozenset(tool["name"] for tool in values if "input_schema" in tool and tool.get("strict") is True)
        )
        return PreambleContent(_BILLING_LINE.sub("", system), tools, forms)

    def messages(self, items: Sequence[Any], first: int) -> list[Message]:
        parsed: list[Message] = []
        for at, value in enumerate(items, start=first):
            parsed += _messages(object_at(value, f"messages.{at}"), f"messages.{at}")
        return parsed

    def options(self, fields: Fields, headers: Mapping[str, str], preamble: Preamble) -> RequestOptions:
        choice = field_at(fields, "tool_choice", dict, {})
        config = field_at(fields, "output_config", dict, {})
        _check_edits(field_at(fields, "context_management", dict, {}))
        lane = headers.get("x-claude-code-agent-id", "")
        return replace(
            common_options(self.name, fields, headers, lane, "max_tokens"),
            stop_sequences=stops_of(field_at(fields, "stop_sequences", list, []), "stop_sequences"),
            tool_choice=messages_choice(choice, preamble),
            output_schema=schema_of(field_of(config, "format", dict, {}), "output_config.format"),
            parallel_calls=not field_of(choice, "disable_parallel_tool_use", bool, False),
        )

    def reply(self, options: RequestOptions, answer: Answer) -> bytes:
        usage = _usage(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        start = _message_start(options, f"msg_{answer.turn_id}")
        return orjson.dumps(start | {"content": _blocks(answer.message), "usage": usage} | _end(answer))

    def stream(self, options: RequestOptions) -> "MessagesStream":
        return MessagesStream(options)

    def failure(self, failure: Failure, message: str) -> HttpFailure:
        status, kind = _STATUS[failure]
        error: dict[str, Any] = {"type": kind, "message": message}
        if failure is Failure.STATE_NOT_KEPT:  # the SDK's tool runner then goes on without a thread
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return HttpFailure(status, orjson.dumps({"type": "error", "error": error}))


class MessagesStream:
    def __init__(self, options: RequestOptions) -> None:
        self.shown = ShownText()
        self._options = options
        self._num_blocks = 0
        self._open_block = ""

    def opening(self, prompt_tokens: int) -> bytes:
        start = _message_start(self._options, f"msg_{uuid4().hex[:24]}")
        start |= {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": start | {"usage": _usage(prompt_tokens, 0, 0)}}) + _PING

    def ping(self) -> bytes:
        return _PING

    def growth(self, turn_id: int, grown: ShownText) -> bytes:
        events = b""
        if new := grown.thinking[len(self.shown.thinking) :]:
            events += self._begin_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events += self._delta({"type": "thinking_delta", "thinking": new})
        if new := grown.text[len(self.shown.text) :]:
            events += self._begin_block("text", {"type": "text", "text": ""})
            events += self._delta({"type": "text_delta", "text": new})
        self.shown = grown
        return events

    def closing(self, answer: Answer) -> bytes:
        events = self.growth(answer.turn_id, ShownText(answer.message.reasoning, answer.message.text))
        for call in answer.message.tool_calls:
            events += self._begin_block(call.id, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            arguments = orjson.dumps(dict(call.arguments)).decode()
            events += self._delta({"type": "input_json_delta", "partial_json": arguments})
        events += self._end_block()
        usage = _usage(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        events += _event({"type": "message_delta", "delta": _end(answer), "usage": usage})
        return events + _event({"type": "message_stop"})

    def _begin_block(self, name: str, empty: dict[str, Any]) -> bytes:
        """The events that end the open block and begin this one, none if it is open already."""
        if self._open_block == name:
            return b""
        events = self._end_block()
        self._open_block = name
        self._num_blocks += 1
        return events + _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open_block:
            return b""
        signed = self._open_block == "thinking"
        self._open_block = ""
        signature = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if signed else b""
        return signature + _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def failed(self, failure: Failure, message: str) -> bytes:
        return b"event: error\ndata: " + MessagesDialect().failure(failure, message).body + b"\n\n"


def _messages(value: dict[str, Any], where: str) -> list[Message]:
    """Split a message with tool results: one per result, and one per stretch of the user's text between them."""
    role, content = value.get("role"), field_of(value, "content", (str, list), "", where)
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{where}.role: {role!r} is none of user, assistant, system")
    if role == "system":
        if value.get("clear_at") not in (None, "never"):
            raise InvalidRequestError(f"{where}.clear_at: no message is cleared here: leave the message out later")
        return [Message("system", _content(content, where).text)]
    blocks = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else [object_at(one, f"{where}.content") for one in content]
    )
    if role == "assistant":
        return [_assistant(blocks, where)]
    if not content:
        raise InvalidRequestError(f"{where}.content: user messages must have non-empty content")
    return _user(blocks, where)


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    messages: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = _content(field_of(block, "content", (str, list), "", where), where)
            call_id = field_of(block, "tool_use_id", str, "", where)
            messages.append(Message("tool", result.text, tool_call_id=call_id, num_omitted=result.num_omitted))
            continue
        text, num_omitted = _content([block], where)
        if messages and messages[-1].role == "user":
            last = messages[-1]
            messages[-1] = replace(last, text=last.text + "\n" + text, num_omitted=last.num_omitted + num_omitted)
        else:
            messages.append(Message("user", text, beside_tool=bool(messages), num_omitted=num_omitted))
    return messages


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    text, reasoning, calls = [], [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            calls.append(called(block.get("id"), block.get("name"), block.get("input")))
        elif block.get("type") == "thinking":
            reasoning.append(field_of(block, "thinking", str, "", where))
        elif block.get("type") != "redacted_thinking":
            text.append(_content([block], where).text)
    return assistant_message("".join(text), "\n".join(reasoning), calls)


def _content(content: str | list[Any], where: str) -> Content:
    return content_of(content, f"{where}.content", "\n", _part)


def _part(block: dict[str, Any], where: str) -> str | Omitted:
    match block.get("type"):
        case "text":
            return str(field_of(block, "text", str, "", where))
        case "image":
            return omitted_image(field_of(block, "source", dict, {}, where).get("data"))
        case "document":
            return _document(block, where)
        case "search_result":
            head = [field_of(block, name, str, "") for name in ("title", "source")]
            found = _content(field_of(block, "content", list, [], where), where).text
            return "\n".join(one for one in (*head, found) if one)
        case "tool_reference":
            return f"[tool {field_of(block, 'tool_name', str, '')}]"
    raise InvalidRequestError(
        f"{where}: {block.get('type')!r} is none of text, image, document, search_result, tool_reference"
    )


def _document(block: dict[str, Any], where: str) -> str | Omitted:
    """A document of text or of blocks is text; of any other, the model sees that it is left out."""
    source = field_of(block, "source", dict, {}, where)
    title, context = (field_of(block, name, str, "") for name in ("title", "context"))
    if source.get("type") not in ("text", "content"):
        placeholder = omitted_file("document", title or source.get("media_type"))
        return Omitted(f"{placeholder.text}\n{context}") if context else placeholder
    content = Content(field_of(source, "data", str, "", where))
    if source["type"] == "content":
        content = _content(field_of(source, "content", (str, list), "", where), where)
    text = "\n".join(one for one in (title, context, content.text) if one or one is content.text)
    return Omitted(text) if content.num_omitted else text


def _tools(values: list[Any]) -> list[Tool]:
    tools: list[Tool] = []
    for at, value in enumerate(values):
        tool = object_at(value, f"tools.{at}")
        if "input_schema" not in tool:
            _check_typed(tool, f"tools.{at}")
            continue
        schema = object_at(tool["input_schema"], f"tools.{at}.input_schema")
        description = "" if tool.get("description") is None else tool["description"]
        function = {"name": tool.get("name"), "description": description, "parameters": schema}
        tools.append(function_tool(function, f"tools.{at}"))
    return tools


def _check_edits(management: dict[str, Any]) -> None:
    """Raise InvalidRequestError for a compaction, on which a client relies; other edits only save tokens."""
    for at, edit in enumerate(field_of(management, "edits", list, [])):
        kind = object_at(edit, f"context_management.edits.{at}").get("type")
        if isinstance(kind, str) and kind.startswith("compact"):
            raise InvalidRequestError(
                f"context_management.edits.{at}: {kind[:100]!r}: no history is compacted here: compact it in the client"
            )


def _check_typed(tool: dict[str, Any], where: str) -> None:
    """Raise InvalidRequestError unless it is a tool that the vendor's own servers run.

    Such a tool is left out, so the model never calls it. A tool that the agent runs needs a schema.
    """
    kind = tool.get("type")
    if not isinstance(kind, str) or not kind.startswith(_RUN_BY_VENDOR):
        raise InvalidRequestError(f"{where}: {str(kind)[:100]!r} has no input_schema; declare the tool with one")


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in message.tool_calls
    ]
    return blocks


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def _message_start(options: RequestOptions, message_id: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": options.model}


def _end(answer: Answer) -> dict[str, Any]:
    if answer.violation is not None and answer.finish != "length":
        details = {"type": "refusal", "category": None, "explanation": answer.violation}
        return {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
    return {"stop_reason": _STOP_REASON[answer.finish], "stop_sequence": answer.stop_sequence}


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, int]:
    """The vendor counts each prompt token once: those read from the cache are not input tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }
