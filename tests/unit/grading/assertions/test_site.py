"""Other values are close to the true ones, so that a patch cannot tell them apart by plausibility."""

import random

import pytest

from grading.assertions.site import other_number, other_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", {"4", "6"}),
        ("0", {"1"}),
        ("99", {"98", "100"}),
        ("0.25", {"0.24", "0.26"}),
        ("10.0", {"9.9", "10.1"}),
        ("0.0", {"0.1"}),
        ("3.", {"2.", "4."}),
    ],
)
def test_numbers(text: str, expected: set[str]) -> None:
    assert {other_number(text, up) for up in (True, False)} == expected


@pytest.mark.parametrize("text", ["", "a", "Total: 12 EUR", "é", "\n", "...", "a\\n"])
def test_texts(text: str) -> None:
    for seed in range(20):
        other = other_text(text, random.Random(seed))
        assert other != text and len(other) - len(text) in (0, 1)
        assert "\\" not in text or other.endswith(text)
        if text == "Total: 12 EUR":
            changed = [(one, two) for one, two in zip(text, other, strict=True) if one != two]
            assert len(changed) == 1 and all(one.isdigit() == two.isdigit() for one, two in changed)
