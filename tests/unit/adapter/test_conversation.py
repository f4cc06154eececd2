"""Equality of answers for clients that keep less of their arguments than JSON has (loose keys)."""

from typing import Any

import pytest

from adapter.conversation import Message, ToolCall


def loose_key(arguments: dict[str, Any], text: str = "") -> bytes:
    return Message("assistant", text, tool_calls=(ToolCall("c", "bash", arguments),)).key(strict=False)


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ({"n": 2**53 + 1}, {"n": 2.0**53}),
        ({"n": -0.0}, {"n": 0}),
        ({"n": 10**400}, {"n": 10**500}),  # both are Infinity in JavaScript
        ({"a": None, "b": [{"c": None}]}, {"b": [{}]}),  # .NET, pydantic's exclude_none
    ],
)
def test_what_clients_do_not_keep_is_no_difference(sampled: dict[str, Any], sent: dict[str, Any]) -> None:
    assert loose_key(sampled) == loose_key(sent)


@pytest.mark.parametrize(
    ("one", "other"), [({"n": True}, {"n": 1}), ({"n": 1}, {"n": 2}), ({"a": [None]}, {"a": []}), ({"a": ""}, {})]
)
def test_other_values_are_a_difference(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert loose_key(one) != loose_key(other)


def test_blanks_that_any_language_trims_are_no_difference() -> None:
    assert loose_key({}, "\ufeff \x85text\xa0\ufeff") == loose_key({}, "text")
    assert loose_key({}, "\u200btext") != loose_key({}, "text")


def test_loose_keys_of_common_arguments_stay_what_they_are() -> None:
    """Rows have them, and a process of the last version computes them."""
    message = Message("assistant", " text\n", "why ", (ToolCall("c", "bash", {"command": "ls", "n": 3, "on": True}),))
    assert message.key(strict=False).hex() == "ccd329288ece1cf659e726621bba47ed"
