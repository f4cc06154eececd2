"""An assertion of a test that can be turned into one that correct solutions fail."""

import random
import re
import string
from dataclasses import dataclass
from typing import Literal

Kind = Literal["value", "refused", "negation", "failure"]
_KINDS = {
    character: kind for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase) for character in kind
}
"""A digit, a small or a capital letter → all characters of that kind."""
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_EQUALITY = frozenset({"equal", "equals", "eq", "eql", "same", "streq"})
_EQUALITY_NAMES = frozenset({"be", "is", "tobe", "tohavelength"})
_OTHER_RELATIONS = frozenset(
    (
        *("not", "no", "ne", "never", "unequal", "wont", "refute", "or", "any", "some", "ignore", "ignoring"),
        *("almost", "approx", "approximate", "approximately", "near", "nearby", "nearly", "close", "within"),
        *("less", "lesser", "greater", "more", "than", "least", "most", "at", "delta", "tolerance", "like"),
        *("in", "contain", "contains", "containing", "include", "includes", "match", "matches", "starts", "ends"),
    )
)


@dataclass(slots=True, frozen=True)
class Insertion:
    """Text that an edit needs elsewhere in the source, before the byte `at`."""

    at: int
    text: str


@dataclass(slots=True, frozen=True)
class AssertionSite:
    """One possible edit of a test's source: the bytes from `start` to `end` become `text`.

    `value`: another expected value next to the true one, of a relation that looks like equality; admission measures
    that the neighbours on both sides fail. `refused`: a value that has no such relation, of another one than equality.
    `negation`: the opposite assertion. `failure`: an assertion that always fails is added. `function`: name of the
    function that holds it, empty if unknown. `needs`: text that the edit uses. `first_line` and `last_line` of the
    assertion, counted from 1; 0 for an added one.
    """

    kind: Kind
    function: str
    start: int
    end: int
    text: str
    needs: tuple[Insertion, ...] = ()
    first_line: int = 0
    last_line: int = 0


def says_equality(name: str) -> bool:
    """Return whether the words of an assertion's name say that two values are equal, and nothing else."""
    parts = {part.lower() for part in _PART.findall(name)}
    return (bool(parts & _EQUALITY) or name.lower() in _EQUALITY_NAMES) and not parts & _OTHER_RELATIONS


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


def far_number(text: str, up: bool) -> str:
    """Return a number, as written, that is larger (`up`) or smaller by so much that no tolerance includes it."""
    whole, point, decimals = text.partition(".")
    number = int(whole) * 9 + 1_000_003 if up else -int(whole) * 9 - 1_000_003
    return f"{number}{point}{decimals}"


def far_text(rng: random.Random) -> str:
    """Return a word that no correct result is likely to be or to contain."""
    return "".join(rng.choice("bcdfghjkmnpqrstvwxz") for _ in range(12))


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
