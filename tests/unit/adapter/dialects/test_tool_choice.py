"""Every form of `tool_choice` that the SDKs' types allow, and what each dialect makes of it."""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import orjson
import pytest
from anthropic.types import ToolChoiceParam
from anthropic.types.beta import BetaToolChoiceParam
from openai.types.chat import ChatCompletionToolChoiceOptionParam
from openai.types.responses import response_create_params
from openai.types.responses.input_token_count_params import ToolChoice as CountedToolChoice

from adapter.conversation import Preamble, ToolChoice
from adapter.dialects.base import Dialect, InvalidRequestError
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from tests.unit.adapter.dialects.sdk_types import kinds_of

NAMES = ("bash", "none", "auto", "required")
"""Tools may have the names of modes."""
CHAT_TOOLS = [
    *({"type": "function", "function": {"name": name}} for name in NAMES),
    {"type": "custom", "custom": {"name": "edit"}},
]
RESPONSES_TOOLS = [
    *({"type": "function", "name": name, "parameters": {}} for name in NAMES),
    {"type": "custom", "name": "edit"},
    {"type": "namespace", "name": "calc", "tools": [{"type": "function", "name": one} for one in ("add", "bash")]},
    {"type": "web_search"},
]
MESSAGES_TOOLS = [
    *({"name": name, "input_schema": {"type": "object"}} for name in (*NAMES, "edit")),
    {"type": "web_search_20260209", "name": "web_search"},
]
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
TOOLS: dict[Dialect, Any] = {CHAT: CHAT_TOOLS, RESPONSES: RESPONSES_TOOLS, MESSAGES: MESSAGES_TOOLS}


def read(dialect: Dialect, choice: Any) -> ToolChoice:
    values = {"tools": TOOLS[dialect], "tool_choice": choice}
    fields = {name: msgspec.Raw(orjson.dumps(value)) for name, value in values.items()}
    content = dialect.preamble(fields)
    return dialect.options(fields, {}, Preamble.of("", content.tools, content.forms)).tool_choice


def one_of(dialect: Dialect, kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A named tool in the dialect's form."""
    if dialect is CHAT:
        return {"type": kind, kind: {"name": name}}
    return {"type": kind, "name": name} | more


def some_of(dialect: Dialect, mode: str, *tools: Any) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": list(tools)}
    kind = {"type": "allowed_tools"}
    return kind | {"allowed_tools": allowed} if dialect is CHAT else kind | allowed


def forms() -> Iterator[tuple[Dialect, Any, set[str] | None, bool]]:
    """Dialect, choice, names whose calls reach the client (None: all), and whether a call is asked for."""
    for dialect in (CHAT, RESPONSES):
        yield from ((dialect, "auto", None, False), (dialect, "none", set(), False), (dialect, "required", None, True))
        for name in NAMES:
            yield dialect, one_of(dialect, "function", name), {name}, True
        yield dialect, one_of(dialect, "custom", "edit"), {"edit"}, True
        listed = one_of(dialect, "function", "bash"), one_of(dialect, "custom", "edit")
        yield dialect, some_of(dialect, "auto", *listed), {"bash", "edit"}, False
        yield dialect, some_of(dialect, "required", *listed), {"bash", "edit"}, True
        yield dialect, some_of(dialect, "auto"), set(), False
    yield RESPONSES, one_of(RESPONSES, "function", "bash", namespace="calc"), {"calc__bash"}, True
    hosted = {"type": "mcp", "server_label": "s"}, {"type": "image_generation"}
    calc = {"type": "namespace", "name": "calc"}
    yield RESPONSES, some_of(RESPONSES, "required", calc, *hosted), {"calc__add", "calc__bash"}, True
    yield RESPONSES, some_of(RESPONSES, "auto", *hosted), set(), False
    for kind, allowed, required in (("auto", None, False), ("any", None, True), ("none", set(), False)):
        yield MESSAGES, {"type": kind}, allowed, required
    for name in NAMES:
        yield MESSAGES, {"type": "tool", "name": name}, {name}, True


FORMS = list(forms())


@pytest.mark.parametrize(
    ("dialect", "choice", "allowed", "required"), FORMS, ids=[f"{one[0].name} {one[1]}" for one in FORMS]
)
def test_a_choice_is_read(dialect: Dialect, choice: Any, allowed: set[str] | None, required: bool) -> None:
    found = read(dialect, choice)
    assert (found.allowed, found.required, found.sent) == (allowed, required, choice)
    assert found.allows("bash") is (allowed is None or "bash" in allowed) and found.allows_calls is (allowed != set())


REFUSED = [
    (CHAT, "any"),
    (CHAT, one_of(CHAT, "function", "rm")),
    (CHAT, one_of(CHAT, "function", "edit")),
    (CHAT, one_of(CHAT, "custom", "bash")),
    (CHAT, {"type": "function", "name": "bash"}),
    (CHAT, some_of(CHAT, "any", one_of(CHAT, "function", "bash"))),
    (CHAT, some_of(CHAT, "auto", one_of(CHAT, "function", "rm"))),
    (CHAT, some_of(CHAT, "required")),
    (RESPONSES, one_of(RESPONSES, "function", "add")),
    (RESPONSES, one_of(RESPONSES, "namespace", "nowhere")),
    (RESPONSES, some_of(RESPONSES, "required", {"type": "image_generation"})),
    (MESSAGES, {"type": "required"}),
    (MESSAGES, {"type": "tool", "name": "rm"}),
    (MESSAGES, {"type": "tool", "name": "web_search"}),
]


@pytest.mark.parametrize(("dialect", "choice"), REFUSED, ids=[f"{one[0].name} {one[1]}" for one in REFUSED])
def test_a_choice_that_cannot_be_kept_is_refused_by_name(dialect: Dialect, choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^tool_choice"):
        read(dialect, choice)


@pytest.mark.parametrize(
    ("dialect", "union"),
    [
        (CHAT, ChatCompletionToolChoiceOptionParam),
        (RESPONSES, response_create_params.ToolChoice),
        (RESPONSES, CountedToolChoice),
        (MESSAGES, ToolChoiceParam),
        (MESSAGES, BetaToolChoiceParam),
    ],
)
def test_every_form_of_the_sdks_is_in_the_table_or_refused(dialect: Dialect, union: Any) -> None:
    """A form that is new in an SDK has to be read, or refused with an error that names it."""
    tested = [choice for one, choice, *_ in FORMS if one is dialect]
    kinds = {choice["type"] for choice in tested if isinstance(choice, dict)}
    for kind in kinds_of(union) - kinds:
        with pytest.raises(InvalidRequestError, match=kind):
            read(dialect, {"type": kind, "server_label": "s"})
    modes = {mode for member in get_args(union) for mode in get_args(member) if isinstance(mode, str)}
    assert modes <= {choice for choice in tested if isinstance(choice, str)}
