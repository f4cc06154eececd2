"""An assertion of a test that can be turned into its contradiction."""

import random
import string
from dataclasses import dataclass
from typing import Literal

Kind = Literal["value", "negation", "failure"]
_KINDS = {
    character: kind for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase) for character in kind
}
"""A digit, a small or a capital letter → all characters of that kind."""


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


def other_number(text: str, up: bool) -> str:
    """Return a number, as written, that is larger (`up`) or smaller by one unit of its last decimal place.

    The nearest other values are the best: a takeover may accept only expected values that are close to what the product
    computes. If it accepts the true value, it also accepts the neighbour on the side of the product's value. Admission
    drops an edit that is within a test's tolerance. 0 only grows: an unsigned type with a sign would not compile, and
    then every patch fails.
    """
    whole, point, decimals = text.partition(".")
    number = int(whole + decimals)
    number += 1 if up or not number else -1
    if not decimals:
        return f"{number}{point}"
    digits = str(number).rjust(len(decimals) + 1, "0")
    return f"{digits[: -len(decimals)]}.{digits[-len(decimals) :]}"


def other_text(value: str, rng: random.Random) -> str:
    """Return the text with one character exchanged for another of its kind.

    A text without such characters, or with a backslash, which may begin an escape, gets one more in front.
    """
    places = [at for at, character in enumerate(value) if character in _KINDS] if "\\" not in value else []
    if not places:
        return rng.choice(string.ascii_lowercase) + value
    at = rng.choice(places)
    others = _KINDS[value[at]].replace(value[at], "")
    return value[:at] + rng.choice(others) + value[at + 1 :]
