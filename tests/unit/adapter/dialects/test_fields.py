"""The table of fields against the SDKs' own types: a field that is new in an SDK fails here until it is decided on."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import orjson
import pytest
from anthropic.types import ContentBlockParam, message_count_tokens_params, message_create_params
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.chat import ChatCompletionContentPartParam, completion_create_params
from openai.types.responses import ResponseInputContentParam, ToolParam, response_create_params

from adapter.conversation import Preamble
from adapter.dialects.base import Dialect, InvalidRequestError, StateNotKeptError
from adapter.dialects.chat import ChatDialect
from adapter.dialects.fields import (
    CHAT_FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
    FieldRule,
    Support,
    check_fields,
    fields_page,
)
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.dialects.responses_tools import tools_of

SDK_TYPES: list[tuple[Mapping[str, FieldRule], Any]] = [
    (MESSAGES_FIELDS, message_create_params.MessageCreateParamsStreaming),
    (MESSAGES_FIELDS, beta_create_params.MessageCreateParamsStreaming),
    (MESSAGES_FIELDS, message_count_tokens_params.MessageCountTokensParams),
    (CHAT_FIELDS, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES_FIELDS, response_create_params.ResponseCreateParamsStreaming),
]


@pytest.mark.parametrize(("rules", "params"), SDK_TYPES, ids=lambda value: getattr(value, "__module__", ""))
def test_every_field_of_the_sdks_is_decided_on(rules: Mapping[str, FieldRule], params: Any) -> None:
    undecided = get_type_hints(params).keys() - rules.keys()
    assert not undecided, f"decide in adapter/dialects/fields.py what becomes of {sorted(undecided)}"


@pytest.mark.parametrize("rules", [MESSAGES_FIELDS, CHAT_FIELDS, RESPONSES_FIELDS])
def test_refused_fields_are_refused_unless_they_ask_for_nothing(rules: Mapping[str, FieldRule]) -> None:
    for name, rule in rules.items():
        if rule.support is not Support.REFUSED:
            check_fields(rules, {name: msgspec.Raw(b'{"any": [1]}')})
            continue
        assert rule.note
        for value in rule.harmless:
            check_fields(rules, {name: msgspec.Raw(orjson.dumps(value))})
        with pytest.raises(StateNotKeptError if rule.is_state else InvalidRequestError, match=f"^{name}: "):
            check_fields(rules, {name: msgspec.Raw(b'{"any": [1]}')})
    with pytest.raises(InvalidRequestError, match="brand_new"):
        check_fields(rules, {"brand_new": msgspec.Raw(b"1")})


def test_the_page_has_the_table() -> None:
    assert fields_page() in Path("docs/adapter.md").read_text(), "run `make docs`"


def kinds_of(union: Any) -> set[str]:
    """The values of `type` of the members of an SDK's union."""
    members = [
        inner for one in get_args(union) for inner in (get_args(one) or (one,)) if hasattr(inner, "__annotations__")
    ]
    return {kind for member in members for kind in get_args(_literal(get_type_hints(member).get("type")))}


def _literal(hint: Any) -> Any:
    return next((one for one in get_args(hint) if isinstance(one, type(get_args(hint)))), hint) if hint else hint


# Of each SDK's kinds of content, those that are refused: their meaning is in the vendor's servers.
REFUSED_BLOCKS = {
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "container_upload", "advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "compaction", "tool_addition",
    "tool_removal", "mcp_tool_listing", "fallback",
}  # fmt: skip
SERVED_BLOCKS = {
    "text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result",
}  # fmt: skip


def test_every_block_of_the_messages_sdk_is_decided_on() -> None:
    kinds = kinds_of(ContentBlockParam) | kinds_of(BetaContentBlockParam)
    assert len(kinds) > 15 and not kinds - REFUSED_BLOCKS - SERVED_BLOCKS, kinds - REFUSED_BLOCKS - SERVED_BLOCKS
    for kind in kinds & REFUSED_BLOCKS:
        with pytest.raises(InvalidRequestError, match=kind):
            MessagesDialect().messages([{"role": "user", "content": [{"type": kind}]}], 0)


def test_every_part_of_the_openai_sdk_is_served() -> None:
    user: dict[str, Any]
    for kind in kinds_of(ChatCompletionContentPartParam):
        user = {"role": "user", "content": [{"type": kind}]}
        assert ChatDialect().messages([user], 0)[0].role == "user"
    assert len(kinds_of(ResponseInputContentParam)) >= 3
    for kind in kinds_of(ResponseInputContentParam):
        user = {"role": "user", "content": [{"type": kind}]}
        assert ResponsesDialect().messages([user], 0)[0].role == "user"


# Tools that the agent runs and whose calls have a form of their own: the model would not be offered them.
REFUSED_TOOLS = {"local_shell", "shell", "apply_patch", "computer", "computer_use_preview"}
OFFERED_TOOLS = {"function", "custom", "namespace"}


def test_every_tool_of_the_responses_sdk_is_decided_on() -> None:
    kinds = kinds_of(ToolParam)
    assert kinds >= OFFERED_TOOLS | REFUSED_TOOLS
    for kind in kinds - OFFERED_TOOLS:
        if kind in REFUSED_TOOLS:
            with pytest.raises(InvalidRequestError, match="declare the tool"):
                tools_of({"type": kind}, "tools[0]")
        else:
            assert tools_of({"type": kind}, "tools[0]") == [], kind


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (ChatDialect(), {"response_format": {"type": "grammar"}}),
        (ChatDialect(), {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}),
        (ResponsesDialect(), {"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}),
        (MessagesDialect(), {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}),
    ],
)
def test_a_format_that_cannot_be_checked_is_refused(dialect: Dialect, fields: dict[str, Any]) -> None:
    raw = {name: msgspec.Raw(orjson.dumps(value)) for name, value in fields.items()}
    with pytest.raises(InvalidRequestError, match=re.escape(next(iter(fields)))):
        dialect.options(raw, {}, Preamble.of("", []))
