"""An assertion of a test that can be turned into its contradiction."""

import random
import string
from dataclasses import dataclass
from typing import Literal

Kind = Literal["value", "negation", "failure"]


@dataclass(slots=True, frozen=True)
class AssertionSite:
    """One possible edit of a test's source: the bytes from `start` to `end` become `text`.

    Code that passes the test as it is fails it after the edit, and the other way round, unless the assertion has lost
    its meaning. `value`: another expected value. `negation`: the opposite assertion. `failure`: an assertion that
    always fails is added. `function`: name of the function that holds it, empty if unknown.
    """

    kind: Kind
    function: str
    start: int
    end: int
    text: str


def other_number(value: int | float, rng: random.Random) -> int | float:
    """Return a number that differs by more than the usual tolerances."""
    return value + rng.randint(1, 9) if isinstance(value, int) else value * 2 + rng.randint(1, 9)


def other_text(value: str, rng: random.Random) -> str:
    """Return the text with one more letter."""
    at = rng.randint(0, len(value))
    return value[:at] + rng.choice(string.ascii_letters) + value[at:]
