"""Restore the part of a Makefile that a test target uses: its recipe, its prerequisites and their variables.

Everything is line by line, in linear time. GNU make's language is larger than this; a change that uses more of it
(includes, defines, a new shell) makes the whole file be restored.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_TEST_TARGET = re.compile(
    r"(?:\A|[-_./])(?:tests?|check|pytest|ci|verify|unit|coverage|spec|e2e)(?:\Z|[-_.:/])", re.IGNORECASE
)
_DANGER = re.compile(
    r"[ ]*(?:-?include|sinclude|override|export|unexport|define|undefine|vpath|load|if(?:n?eq|n?def)|else|endif)\b"
    r"|[ ]*\.(?:SHELLFLAGS|ONESHELL|RECIPEPREFIX|DEFAULT_GOAL|EXPORT_ALL_VARIABLES|DEFAULT|IGNORE|POSIX"
    r"|SECONDEXPANSION)\b"
    r"|[ ]*(?:SHELL|MAKEFLAGS|MAKE|MAKECMDGOALS|PATH|VPATH|MAKEFILES|PYTEST\w*|PYTHON|PYTHONPATH|NODE_OPTIONS|GOFLAGS"
    r"|RUSTFLAGS|CC|CXX|LD|AS)\b[ \t]*[:+?!]*="
)
_CALL = re.compile(r"\$[({](?:shell|eval|file|guile)\b")
_ASSIGNMENT = re.compile(r"[ \t]*([^\s:#=!?+]+)[ \t]*(?::{0,3}|[+?!])=")
_REFERENCE = re.compile(r"\$(?:[({]([\w.%/@-]+)|([A-Za-z]))")
_WORD = re.compile(r"[^\s:;|&\"'`$(){}]+")


class _Block(NamedTuple):
    """A rule with its recipe, an assignment, or other lines. `names`: its targets or its variable."""

    names: tuple[str, ...]
    text: str

    @property
    def is_test(self) -> bool:
        return any(_TEST_TARGET.search(name) for name in self.names) and not _ASSIGNMENT.match(self.text)


def _logical_lines(text: str) -> list[str]:
    """Return the lines with their line ends; a line that ends in a backslash goes on in the next one."""
    lines: list[list[str]] = []
    goes_on = False
    for line in re.findall(r"[^\n]*\n|[^\n]+\Z", text):
        if goes_on:
            lines[-1].append(line)
        else:
            lines.append([line])
        goes_on = line.rstrip("\r\n").endswith("\\")
    return ["".join(parts) for parts in lines]


def _targets(line: str) -> tuple[str, ...]:
    """Return the targets of a rule's first line, nothing for another line."""
    if line[:1] in ("\t", "#", "\n", "") or _ASSIGNMENT.match(line):
        return ()
    head, colon, rest = line.partition(":")
    return tuple(head.split()) if colon and not rest.startswith("=") else ()


def _blocks(text: str) -> list[_Block]:
    found: list[tuple[tuple[str, ...], list[str]]] = []
    in_rule = False
    for line in _logical_lines(text):
        targets = _targets(line)
        assigned = _ASSIGNMENT.match(line) if not line.startswith("\t") else None
        names = targets or ((assigned[1],) if assigned else ())
        is_recipe = in_rule and (line.startswith("\t") or not line.strip())
        if is_recipe or (found and not in_rule and not names and not found[-1][0]):
            found[-1][1].append(line)
        else:
            found.append((names, [line]))
            in_rule = bool(targets)
    return [_Block(names, "".join(lines)) for names, lines in found]


def _used_by_tests(blocks: Iterable[_Block]) -> list[str]:
    """Return the blocks that test targets use, at any depth, in order."""
    by_name: dict[str, list[int]] = {}
    listed = list(blocks)
    for number, block in enumerate(listed):
        for name in block.names:
            by_name.setdefault(name, []).append(number)
    waiting = [number for number, block in enumerate(listed) if block.is_test]
    used: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number in used:
            continue
        used.add(number)
        text = listed[number].text
        names = {*_WORD.findall(text), *(first or second for first, second in _REFERENCE.findall(text))}
        # Each name is followed once, so that the time is linear.
        waiting += [other for name in names for other in by_name.pop(name, ())]
    return [listed[number].text.rstrip() for number in sorted(used)]


def _dangers(text: str) -> list[str]:
    return [line.strip() for line in _logical_lines(text) if _DANGER.match(line) or _CALL.search(line)]


def test_recipes(text: str) -> str:
    """Return the text that test targets use."""
    return "\n".join(_used_by_tests(_blocks(text)))


test_recipes.__test__ = False  # type: ignore[attr-defined]


def _open_rules(blocks: Iterable[_Block]) -> set[str]:
    """Return the texts of rules and assignments whose names are made from others, which may be those of tests."""
    return {
        block.text.strip()
        for block in blocks
        if any("%" in name or "$" in name or (name.startswith(".") and name != ".PHONY") for name in block.names)
    }


def restore_makefile(base: str, patched: str) -> str | None:
    """Return `patched` with the part that test targets use as in `base`, None if the parts cannot be told apart."""
    if _dangers(patched) != _dangers(base):
        return None
    old, new = _blocks(base), _blocks(patched)
    if _open_rules(new) - _open_rules(old):
        return None
    if _used_by_tests(new) == _used_by_tests(old):
        return patched
    kept = "".join(block.text for block in new if not block.is_test)
    merged = (
        kept
        + ("\n" if kept and not kept.endswith("\n") else "")
        + "".join(block.text for block in old if block.is_test)
    )
    return merged if sorted(_used_by_tests(_blocks(merged))) == sorted(_used_by_tests(old)) else None
