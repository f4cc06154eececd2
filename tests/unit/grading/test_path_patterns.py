"""Patterns match as in .gitignore, also for hostile paths, in linear time."""

import pytest

from grading.integrity_rules import RULES
from grading.path_patterns import matches_pattern


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("**/x.py", "x.py", True),
        ("**/x.py", "a/b/x.py", True),
        ("**/x.py", "a/yx.py", False),
        ("a/**", "a/b/c", True),
        ("a/**", "a", False),
        ("**/a/**/b", "a/b", True),
        ("**/a/**/b", "x/a/y/z/b", True),
        ("*.mk", "a/b.mk", False),
        ("**/*.mk", "a/new\nline.mk", True),
        ("hooks/pre-*", "hooks/pre-commit", True),
        ("hooks/pre-*", "hooks/pre-commit/x", False),
        ("docs", "docs", True),
        ("**/.git/**", ".git/config", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches_pattern(path, [pattern]) == expected


@pytest.mark.parametrize("path", ["a/" * 500_000, "x" * 1_000_000, "a.egg-info." * 90_000, "gradle/" * 140_000])
def test_long_paths(path: str) -> None:
    for rule in RULES:
        matches_pattern(path, rule.files)
