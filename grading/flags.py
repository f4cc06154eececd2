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
from grading.integrity_rules import ORDINARY_TESTS
from grading.path_patterns import matches_pattern
from grading.task_tests import is_test_name, parent_directories

_COMPARES = "defines how values compare"
_PYTHON = (".py", ".pyx", ".pyi")
_JAVASCRIPT = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx", ".vue")
_ORDINARY_IN_TESTS = ("names the test runner", "names a test file", "ends the process")
"""Ordinary deeds of tests, of their helpers and of the programs that start them."""
_TEST_PROGRAMS = ("conftest.py", "noxfile.py")
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
    is_test = _is_of_tests(change.path)
    for one in _patterns():
        is_ordinary = is_test and one.what in _ORDINARY_IN_TESTS
        if not is_ordinary and change.path.endswith(one.suffixes) and one.pattern.search(text):
            yield Flag(one.what, change.path)


def _is_of_tests(path: str) -> bool:
    return (
        path.endswith(_TEST_PROGRAMS)
        or matches_pattern(path, ORDINARY_TESTS)
        or any(parent and is_test_name(parent) for parent in parent_directories(path))
    )
