"""Match paths against patterns as in .gitignore, in time that is linear in the length of the path.

`**/` stands for any depth, `/**` for everything below, `*` and `?` match within a name.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class _DeepPattern(NamedTuple):
    """A pattern name by name; None stands for `**`. `literals`: names that a path must have, to skip most paths."""

    literals: frozenset[str]
    pieces: tuple[re.Pattern[str] | None, ...]


class _Patterns(NamedTuple):
    """`names`: the patterns `**/NAME`, as one expression for the last name. `deep`: the others."""

    names: re.Pattern[str] | None
    deep: tuple[_DeepPattern, ...]


def _name_expression(name: str) -> str:
    return re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")


def _deep(pattern: str) -> _DeepPattern:
    parts = pattern.split("/")
    if parts[-1] == "**":
        parts[-1:] = ["*", "**"]
    pieces = tuple(None if part == "**" else re.compile(_name_expression(part), re.DOTALL) for part in parts)
    return _DeepPattern(frozenset(part for part in parts if "*" not in part and "?" not in part), pieces)


@cache
def _compile(patterns: tuple[str, ...]) -> _Patterns:
    names = [pattern[3:] for pattern in patterns if pattern.startswith("**/") and "/" not in pattern[3:]]
    names = [name for name in names if name != "**"]
    deep = tuple(_deep(pattern) for pattern in patterns if pattern[3:] not in names or pattern[:3] != "**/")
    if not names:
        return _Patterns(None, deep)
    return _Patterns(re.compile("|".join(f"(?:{_name_expression(name)})" for name in names), re.DOTALL), deep)


def _matches(parts: Sequence[str], pieces: Sequence[re.Pattern[str] | None]) -> bool:
    """Follow the set of positions in `parts` that the pieces so far can reach."""
    reached = {0}
    for piece in pieces:
        if not reached:
            return False
        if piece is None:
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(parts) and piece.fullmatch(parts[at])}
    return len(parts) in reached


def matches_pattern(path: str, patterns: Sequence[str]) -> bool:
    """Return whether the path matches one of the patterns."""
    names, deep = _compile(tuple(patterns))
    parts = path.split("/")
    if names is not None and names.fullmatch(parts[-1]):
        return True
    found = set(parts)
    return any(pattern.literals <= found and _matches(parts, pattern.pieces) for pattern in deep)
