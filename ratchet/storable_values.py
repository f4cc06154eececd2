"""Find what a JSON column cannot hold in values that people give, so that the message can name the place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ratchet.storable_text import is_storable

MAX_DEPTH = 100
"""Lists and objects within each other. JSON encoders give up at 250 and more."""
_INTEGERS = range(-(2**63), 2**64)
"""The integers that JSON encoders write, signed or not."""


@dataclass(frozen=True, slots=True)
class Unstorable:
    """A part of a value that cannot be stored. `path`: names and numbers that lead to it; empty: the value itself."""

    path: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.message}" if self.path else self.message


def find_unstorable(value: Any, only_json: bool = False) -> Unstorable | None:
    """Return the first part that cannot be stored. `only_json`: objects other than JSON's cannot, such as dates."""
    return next(_unstorable_parts(value, (), only_json), None)


def _unstorable_parts(value: Any, path: tuple[str, ...], only_json: bool) -> Iterator[Unstorable]:
    problem = _problem_of(value, only_json)
    if problem:
        yield Unstorable(path, problem)
    elif isinstance(value, dict | list | tuple):
        if len(path) >= MAX_DEPTH:
            yield Unstorable(path[:3], f"is more than {MAX_DEPTH} lists and objects deep")
            return
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(name, str) and not is_storable(name):
                yield Unstorable(path, f"has the name {name!r:.60}, which contains NUL or half a surrogate pair")
            yield from _unstorable_parts(part, (*path, str(name)), only_json)


def _problem_of(value: Any, only_json: bool) -> str:
    """Return why a value cannot be stored, apart from its parts; empty if it can."""
    match value:
        case bool() | None:
            return ""
        case str():
            return "" if is_storable(value) else "contains NUL or half a surrogate pair, which cannot be stored"
        case int():
            return "" if value in _INTEGERS else "is beyond 64 bits"
        case float():
            return "" if math.isfinite(value) else f"is {value}, and not a finite number"
        case dict():
            is_json = all(isinstance(name, str) for name in value)
            return "" if is_json or not only_json else "has a name that is no text"
        case list() | tuple():
            return ""
    return f"is of the type {type(value).__name__}, which JSON does not have" if only_json else ""
