"""Values that text columns, JSON columns and Temporal can hold: text without NUL and lone surrogates, finite numbers.

What other programs print is stored with escapes. What people give is refused, with a message that names the place.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 100
"""Lists and objects within each other. JSON encoders give up at 250 and more."""
_INTEGERS = range(-(2**63), 2**64)
"""The integers that JSON encoders write, signed or not."""
_ESCAPED = re.compile(r"\\u0000|\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]")
"""NUL and half a surrogate pair, as `json.dumps` writes them; it writes what is beyond 16 bits as a whole pair."""
_REFUSED = re.compile("[\0\ud800-\udfff]")


def storable_text(text: str) -> str:
    """Return the text with NUL and lone surrogates written as escapes."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def is_storable(text: str) -> bool:
    """Return whether the text can be stored as it is."""
    return _REFUSED.search(text) is None


def storable_json(value: Any) -> str:
    """Return the value as JSON, all its texts and names of fields as `storable_text` has them."""
    text = json.dumps(value)
    if _ESCAPED.search(text):
        text = json.dumps(storable_parts(value))
    return text


def storable_parts(value: Any) -> Any:
    """Return a value of lists, dicts and texts with `storable_text` of each text, also of the names of fields."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, dict):
        return {storable_parts(key): storable_parts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [storable_parts(one) for one in value]
    return value


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
