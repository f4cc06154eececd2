import json
from typing import Any

import pytest

from ratchet.storable_values import MAX_DEPTH, find_unstorable, is_storable, storable_json, storable_text


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "place", "message"),
    [
        ("a\0", (), "contains NUL"),
        ({"a": ["b", {"c": "\udcff"}]}, ("a", "1", "c"), "half a surrogate pair"),
        ({"a": {"b\0": 1}}, ("a",), "has the name 'b\\x00'"),
        ([1, float("nan")], ("1",), "is nan"),
        ({"a": float("-inf")}, ("a",), "is -inf"),
        (2**64, (), "beyond 64 bits"),
        (-(2**63) - 1, (), "beyond 64 bits"),
        (nested(MAX_DEPTH + 1), ("0", "0", "0"), "lists and objects deep"),
        ({"a": b"x"}, ("a",), "is of the type bytes"),
        ({1: "x"}, (), "has a name that is no text"),
    ],
)
def test_the_place_of_what_cannot_be_stored_is_found(value: Any, place: tuple[str, ...], message: str) -> None:
    found = find_unstorable(value, only_json=True)
    assert found is not None and found.path == place and message in str(found)


@pytest.mark.parametrize(
    "value", ["é \U0001f600", -(2**63), 2**64 - 1, 1e308, True, None, nested(MAX_DEPTH), {"a": [1, ("b", {})]}]
)
def test_what_json_holds_is_storable(value: Any) -> None:
    assert find_unstorable(value, only_json=True) is None


def test_other_objects_are_the_callers_business_unless_only_json_is_asked_for() -> None:
    assert find_unstorable({1: b"x", "a": object()}) is None


@pytest.mark.parametrize(("text", "stored"), [("a\0b", "a\\0b"), ("a\udcff", "a\\udcff"), ("é \U0001f600\n", None)])
def test_only_what_cannot_be_stored_becomes_an_escape(text: str, stored: str | None) -> None:
    assert storable_text(text) == (text if stored is None else stored)
    assert is_storable(text) == (stored is None)
    assert is_storable(storable_text(text))


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"a\0": ["x\ud800", 1, None, {"y": "\0"}]}, {"a\\0": ["x\\ud800", 1, None, {"y": "\\0"}]}),
        ({"a": ["\U0001f600", "\\u0000", 1.5, True]}, {"a": ["\U0001f600", "\\u0000", 1.5, True]}),
        ({1: ("a", "\0")}, {"1": ["a", "\\0"]}),
    ],
)
def test_json_is_storable_in_all_its_parts(value: Any, stored: Any) -> None:
    assert json.loads(storable_json(value)) == stored
