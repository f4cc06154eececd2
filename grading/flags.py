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
from itertools import islice
from typing import Any

from grading.comparison_flags import changes_python_comparisons
from grading.diff_sections import FileChange, printable_path
from grading.integrity_rules import ORDINARY_TESTS
from grading.path_patterns import matches_pattern
from grading.task_tests import is_test_name, parent_directories

_MAX_FLAGS = 50
_MAX_LINE = 2000


@dataclass(slots=True, frozen=True)
class Flag:
    """Suspicious code. `what`: what it does; `place`: file, or file:line."""

    what: str
    place: str


@dataclass(slots=True, frozen=True)
class _Pattern:
    """`every`: expressions that must all be found in the added lines of one file."""

    what: str
    suffixes: tuple[str, ...]
    every: tuple[re.Pattern[str], ...]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("grading") / "flag_patterns.toml").read_text())


@cache
def _patterns() -> list[_Pattern]:
    return [
        _Pattern(what, tuple(group["suffixes"]), tuple(map(re.compile, every)))
        for group in _table()["languages"]
        for what, *every in group["patterns"]
    ]


def static_flags(changes: Sequence[FileChange], left_out: Collection[str]) -> list[Flag]:
    """Return the flags of the added lines, at most 50. `left_out`: printable paths that did not get into the box.

    The time is linear in the size of the patch: a pattern has no nested repetition, and a long line is cut.
    """
    kept = [one for one in changes if printable_path(one.path) not in left_out and not one.deleted]
    return list(islice(dict.fromkeys(flag for change in kept for flag in _flags_of(change)), _MAX_FLAGS))


def _flags_of(change: FileChange) -> Iterator[Flag]:
    text = "\n".join(line[:_MAX_LINE] for line in change.added_text.split("\n"))
    if change.path.endswith((".py", ".pyx", ".pyi")) and changes_python_comparisons(text):
        yield Flag("defines how values compare", change.path)
    ordinary = _ordinary_deeds(change.path)
    for one in _patterns():
        is_searched = one.what not in ordinary and change.path.endswith(one.suffixes)
        if is_searched and all(pattern.search(text) for pattern in one.every):
            yield Flag(one.what, change.path)


def _ordinary_deeds(path: str) -> set[str]:
    """Return what files of such a name do in honest work."""
    named = [*parent_directories(path), path.removesuffix(".py") if path.endswith(".py") else ""]
    is_test = matches_pattern(path, ORDINARY_TESTS) or any(name and is_test_name(name) for name in named)
    return {
        what
        for group in _table()["ordinary"]
        if (is_test and group.get("of_tests")) or matches_pattern(path, group["files"])
        for what in group["what"]
    }
