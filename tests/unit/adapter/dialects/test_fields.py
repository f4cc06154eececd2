"""The tables of fields against the SDKs' own types: a field, or a member of a union, that is new in an SDK fails here
until it is decided on.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
import orjson
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import ResponseIncludable, input_token_count_params, response_create_params

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
)
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from tests.unit.adapter.dialects.nested_fields import CHAT_OBJECTS, MESSAGES_OBJECTS, RESPONSES_OBJECTS, NestedFields
from tests.unit.adapter.dialects.sdk_types import classes_in, literals

SDK_TYPES: list[tuple[Dialect, Any]] = [
    (MessagesDialect(), message_create_params.MessageCreateParamsStreaming),
    (MessagesDialect(), beta_create_params.MessageCreateParamsStreaming),
    (MessagesDialect(), message_count_tokens_params.MessageCountTokensParams),
    (MessagesDialect(), beta_count_params.MessageCountTokensParams),
    (ChatDialect(), completion_create_params.CompletionCreateParamsStreaming),
    (ResponsesDialect(), response_create_params.ResponseCreateParamsStreaming),
    (ResponsesDialect(), input_token_count_params.InputTokenCountParams),
]
NESTED: dict[str, NestedFields] = {
    "messages": MESSAGES_OBJECTS,
    "chat": CHAT_OBJECTS,
    "responses": RESPONSES_OBJECTS,
}
EACH_SDK_TYPE = pytest.mark.parametrize(
    ("dialect", "params"), SDK_TYPES, ids=lambda value: getattr(value, "__module__", "")
)


@EACH_SDK_TYPE
def test_every_field_of_the_sdks_is_decided_on(dialect: Dialect, params: Any) -> None:
    undecided = get_type_hints(params).keys() - dialect.rules.keys()
    assert not undecided, f"decide in adapter/dialects/fields.py what becomes of {sorted(undecided)}"


def objects_in(place: str, hint: Any, nested: NestedFields, seen: set[Any]) -> Iterator[tuple[str, set[str]]]:
    """Every kind of object that an honoured field may contain at any depth, as `place kind`, with its fields.

    What stands in objects or fields that have no effect or are refused needs no decision.
    """
    place = nested.same.get(place, place)
    for one in classes_in(hint):
        hints = get_type_hints(one)
        kinds = list(literals(hints.get("type"))) or list(literals(hints.get("role")))
        for name in [f"{place} {kind}" for kind in kinds] or [place]:
            if (one, name) in seen:
                continue
            seen.add((one, name))
            yield name, set(hints)
            fields = nested.read.get(name)
            for field in fields.honoured.split() if fields is not None else ():
                if field in hints:
                    yield from objects_in(field, hints[field], nested, seen)


def undecided_in(params: Any, dialect: Dialect) -> set[str]:
    """Objects of the SDK's types and fields of objects that are in none of the tables."""
    nested = NESTED[dialect.name]
    seen: set[Any] = set()
    found: set[str] = set()
    for root, hint in get_type_hints(params).items():
        if root not in dialect.rules or dialect.rules[root].support is not Support.HONOURED:
            continue
        for name, fields in objects_in(root, hint, nested, seen):
            place, _, kind = name.partition(" ")
            if name in nested.read:
                known = nested.read[name]
                names = f"{known.honoured} {known.no_effect} {known.refused}".split()
                found |= {f"{name}: {field}" for field in fields.difference(names)}
            elif kind not in f"{nested.refused.get(place, '')} {nested.left_out.get(place, '')}".split():
                found.add(name)
    return found


@EACH_SDK_TYPE
def test_every_object_inside_of_honoured_fields_is_decided_on(dialect: Dialect, params: Any) -> None:
    undecided = undecided_in(params, dialect)
    assert not undecided, f"decide in nested_fields.py what becomes of {sorted(undecided)}"


def test_a_new_member_of_a_union_or_a_new_field_would_be_noticed() -> None:
    """The walk reaches the unions of content, tools, choices and formats: without one of its entries, it fails."""
    for dialect, params in SDK_TYPES[1:2] + SDK_TYPES[4:6]:
        nested = NESTED[dialect.name]
        reached: set[str] = set()
        for root, hint in get_type_hints(params).items():
            if dialect.rules[root].support is Support.HONOURED:
                reached |= {name for name, _ in objects_in(root, hint, nested, set())}
        for place in nested.refused.keys() | nested.left_out.keys():
            kinds = {*nested.refused.get(place, "").split(), *nested.left_out.get(place, "").split()}
            assert {f"{place} {kind}" for kind in kinds} <= reached, "remove what the SDK has no more"
        assert nested.read.keys() <= reached, nested.read.keys() - reached


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


def read(dialect: Dialect, place: str, value: dict[str, Any]) -> Preamble:
    """Give a dialect a request with this object in this field, and return the preamble."""
    inside: dict[str, Any] = {
        "content": {"messages": [{"role": "user", "content": [value]}]},
        "edits": {"context_management": {"edits": [value]}},
        "tool_choice": {"tool_choice": value},
    }
    body = inside.get(place, {place: [value]})
    fields = {name: msgspec.Raw(orjson.dumps(one)) for name, one in body.items()}
    content = dialect.preamble(fields)
    preamble = Preamble.of(content.system, content.tools, content.forms)
    if (history := body.get(dialect.history)) is not None:
        dialect.messages(history, 0)
    dialect.options(fields, {}, preamble)
    return preamble


REFUSED_KINDS = [
    (dialect, place, kind)
    for dialect in (MessagesDialect(), ChatDialect(), ResponsesDialect())
    for place, kinds in NESTED[dialect.name].refused.items()
    for kind in kinds.split()
]


@pytest.mark.parametrize(
    ("dialect", "place", "kind"), REFUSED_KINDS, ids=[f"{dialect.name} {rest}" for dialect, *rest in REFUSED_KINDS]
)
def test_a_refused_kind_of_object_is_named(dialect: Dialect, place: str, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=kind if kind != "item_reference" else "send the item itself"):
        read(dialect, place, {"type": kind, "role": kind, "name": "x"})


def test_tools_that_the_vendors_run_are_left_out() -> None:
    for dialect in (MessagesDialect(), ResponsesDialect()):
        for kind in NESTED[dialect.name].left_out["tools"].split():
            assert read(dialect, "tools", {"type": kind, "name": "x"}).tools == (), kind


REFUSED_INSIDE = [
    (MessagesDialect(), {"role": "system", "content": "x", "clear_at": "next_user_message"}, "clear_at"),
    (ChatDialect(), {"role": "assistant", "audio": {"id": "audio_1"}}, "audio"),
    (ChatDialect(), {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
]


def test_the_search_of_another_vendor_is_left_out() -> None:
    """grok-cli sends these with every call."""
    for name, value in (("search_parameters", b'{"mode": "auto"}'), ("max_turns", b"5"), ("include", b'["citations"]')):
        check_fields(CHAT_FIELDS, {name: msgspec.Raw(value)})


def test_refused_fields_of_objects_are_refused_by_name() -> None:
    listed = {
        f"{dialect.name} {name} {field}"
        for dialect, nested in ((one, NESTED[one.name]) for one in (MessagesDialect(), ChatDialect()))
        for name, fields in nested.read.items()
        for field in fields.refused.split()
    }
    assert {f"{dialect.name} messages {one['role']} {field}" for dialect, one, field in REFUSED_INSIDE} == listed
    assert not any(fields.refused for fields in RESPONSES_OBJECTS.read.values())
    for dialect, message, field in REFUSED_INSIDE:
        with pytest.raises(InvalidRequestError, match=field):
            dialect.messages([message], 0)
        assert dialect.messages([message | {field: None}], 0)


def test_parts_that_are_read_are_served_also_if_they_are_empty() -> None:
    """Images and files that the model cannot see are placeholders."""
    for dialect in (ChatDialect(), ResponsesDialect()):
        kinds = [name.removeprefix("content ") for name in NESTED[dialect.name].read if name.startswith("content ")]
        for kind in set(kinds) - {"reasoning_text"}:
            assert dialect.messages([{"role": "user", "content": [{"type": kind}]}], 0)[0].role == "user"


def test_what_a_response_can_include_is_decided_on() -> None:
    """Honoured: encrypted reasoning, which is always there, and logprobs. The others are of tools that vendors run."""
    honoured = {"reasoning.encrypted_content", "message.output_text.logprobs"}
    without_effect = {
        "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
        "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    }  # fmt: skip
    assert set(get_args(ResponseIncludable)) == honoured | without_effect
    assert all(one in RESPONSES_FIELDS["include"].note for one in honoured)


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
