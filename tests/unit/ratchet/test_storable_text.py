import json
from typing import Any

import pytest

from ratchet.storable_text import is_storable, storable_json, storable_text


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
