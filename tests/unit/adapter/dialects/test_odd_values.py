"""Values that are valid JSON and that no vendor's SDK sends: each is read, or refused with a sentence that is true."""

from typing import Any

import orjson
import pytest

from adapter.dialects.base import Dialect, InvalidRequestError
from adapter.dialects.chat import ChatDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.request_parser import ParsedRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}]}


def parsed(dialect: Dialect, body: bytes) -> ParsedRequest:
    return IncrementalParser(PreambleCache()).parse(body, dialect, {})


@pytest.mark.parametrize("field", ["n", "store", "audio"])
@pytest.mark.parametrize("value", [b"1e400", b'[{"a": -1e999}]'])
def test_a_number_beyond_all_doubles_in_a_refused_field_is_the_clients_error(field: str, value: bytes) -> None:
    body = orjson.dumps(CHAT)[:-1] + b',"' + field.encode() + b'":' + value + b"}"
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        parsed(ChatDialect(), body)


def test_a_limit_of_no_tokens_is_refused_under_either_name() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(InvalidRequestError, match=f"^{name}: must be at least 1"):
            parsed(ChatDialect(), orjson.dumps(CHAT | {name: 0}))
    limits = {"max_completion_tokens": 7, "max_tokens": 9}
    assert parsed(ChatDialect(), orjson.dumps(CHAT | limits)).options.max_tokens == 7
    assert parsed(ChatDialect(), orjson.dumps(CHAT | limits | {"max_completion_tokens": None})).options.max_tokens == 9


def test_a_type_that_is_null_is_the_default_type() -> None:
    """As of clients that write all fields of an object."""
    items = [{"type": None, "role": "user", "content": "go"}]
    assert parsed(ResponsesDialect(), orjson.dumps({"input": items})).runs[0].messages[0].text == "go"
    tools = [{"type": None, "function": {"name": "bash", "strict": True}}]
    choice = {"type": None, "function": {"name": "bash"}}
    asked = {"tools": tools, "tool_choice": choice, "response_format": {"type": None}}
    request = parsed(ChatDialect(), orjson.dumps(CHAT | asked))
    assert request.options.tool_choice.allowed == {"bash"} and request.preamble.forms.strict == {"bash"}


@pytest.mark.parametrize("item", [{"type": ["x"]}, {"role": "user", "content": [{"type": ["x"]}]}])
def test_a_type_that_is_no_text_is_not_called_too_deep(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="is none of"):
        parsed(ResponsesDialect(), orjson.dumps({"input": [item]}))
