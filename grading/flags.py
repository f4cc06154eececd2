"""Flags: code in a patch that honest work rarely needs and takeovers of a test run do. Flags never change a verdict.

Static flags come from the lines that a patch adds, dynamic ones from an audit hook in the Python processes of a test
run (`box/sitecustomize.py`). Operators filter by them; a rising share among solved rollouts is an alarm.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from grading.comparison_flags import changes_javascript_assertions, changes_python_comparisons
from grading.diff_sections import FileChange, printable_path

_COMPARES = "defines how values compare"
_PYTHON = (".py", ".pyx", ".pyi")
_JAVASCRIPT = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx", ".vue")
_MAX_FLAGS = 50
_MAX_LINE = 2000


@dataclass(slots=True, frozen=True)
class Flag:
    """Suspicious code. `what`: what it does; `place`: file, or file:line."""

    what: str
    place: str


@dataclass(slots=True, frozen=True)
class _Pattern:
    what: str
    suffixes: tuple[str, ...]
    pattern: re.Pattern[str]


@cache
def _patterns() -> list[_Pattern]:
    table = tomllib.loads((files("grading") / "flag_patterns.toml").read_text())
    return [
        _Pattern(what, tuple(group["suffixes"]), re.compile(pattern))
        for group in table["languages"]
        for what, pattern in group["patterns"]
    ]


def static_flags(changes: Sequence[FileChange], left_out: Collection[str]) -> list[Flag]:
    """Return the flags of the added lines, at most 50. `left_out`: printable paths that did not get into the box.

    The time is linear in the size of the patch: a pattern has no nested repetition, and a long line is cut.
    """
    found: dict[Flag, None] = {}
    for change in changes:
        if printable_path(change.path) not in left_out and not change.deleted:
            for flag in _flags_of(change):
                found.setdefault(flag)
                if len(found) == _MAX_FLAGS:
                    return list(found)
    return list(found)


def _flags_of(change: FileChange) -> Iterator[Flag]:
    text = "\n".join(line[:_MAX_LINE] for line in change.added_text.split("\n"))
    if change.path.endswith(_PYTHON) and changes_python_comparisons(text):
        yield Flag(_COMPARES, change.path)
    if change.path.endswith(_JAVASCRIPT) and changes_javascript_assertions(text):
        yield Flag(_COMPARES, change.path)
    for one in _patterns():
        if change.path.endswith(one.suffixes) and one.pattern.search(text):
            yield Flag(one.what, change.path)
