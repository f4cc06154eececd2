"""Read from the printed log of a test command how many tests ran, and which program it did not find.

A command that is judged by its exit code or reward file alone shows by nothing else that tests ran. The code under test
can print such lines, too; then a verdict is missing or rests on the exit code, as without them.
"""

import re

_COUNTS = (
    r"^(?:ok|FAIL)[ \t]+\S+[ \t]+(?:[\d.]+s|\(cached\))(?!.*\[no tests)()",  # go, by package
    r"^--- (?:PASS|FAIL): ()",
    r"^> Task :(?:\S+:)?test(?: FAILED)?()$",  # gradle
    r"^(?:not )?ok \d+\b(?!.*# skip)()",  # TAP
    r"\b(\d+) (?:passed|failed|errors?|xfailed|xpassed)\b(?=.* in [\d.]+ ?s)",  # pytest
    r"^Ran (\d+) tests? in ",  # unittest
    r"^Ran \d+ tests? in [\d.]+s\s{1,4}(?:OK|FAILED) \([^)\n]*?skipped=(?P<minus>\d+)",
    r"^test result: \S+ (\d+) passed",  # cargo
    r"^test result: \S+ \d+ passed; (\d+) failed",
    r"^[ \t]*Tests:?[ \t].*?\b(\d+) passed",  # jest, vitest
    r"^[ \t]*Tests:?[ \t].*?\b(\d+) failed",
    r"^[ \t]*(\d+) (?:passing|failing)\b",  # mocha
    r"^(?:#|ℹ) (?:pass|fail) (\d+)$",
    r"^(?:ok|FAILED) \| (\d+) passed",  # deno
    r"^(?:ok|FAILED) \| .*?\b(\d+) failed",
    r"^(\d+) (?:examples?|runs|tests?), \d+ (?:failures?|assertions)",  # rspec, minitest, ExUnit
    r"^OK \((\d+) tests?, ",  # phpunit
    r"^Tests: (\d+), Assertions",
    r"Tests run: (\d+), Failures",  # surefire, JUnit
    r"^\d+% tests passed, \d+ tests failed out of (\d+)",  # ctest
    r"^\[=+\] (\d+) tests? from ",  # googletest
    r"^# TOTAL: +(\d+)$",  # automake
    r"^Files=\d+, Tests=(\d+)",  # prove
    r"^[ \t]*Executed (\d+) tests?, with",  # XCTest
    r"^[ \t]*Total tests: (\d+)$",  # dotnet
)
"""Lines of runners. A group is the number of tests that ran, an empty one is one test; `minus` is subtracted."""

_NONE = (
    r"\bno tests? (?:ran|found|to run|files?|executed)\b",
    r"\bno test (?:files? found|is available)\b",
    r"\b(?:there are no|no) tests (?:to run|were found|executed)\b",
    r"^(?:=+ )?\d+ (?:skipped|deselected).* in [\d.]+ ?s",
    r"^running 0 tests$",
    r"^collected 0 items",
    r"^1\.\.0\b",
    r"^> Task :\S*test\S* NO-SOURCE$",
    r"\bResult: NOTESTS$",
)
_MAX_CHARACTERS = 100_000
_MAX_LINE = 500
_PROGRAM = r"[^:\n]+"
_MISSING = (
    rf"^\S+: (?:line \d+: )?{_PROGRAM}: command not found$",
    rf"^\S+: line \d+: {_PROGRAM}: (?:No such file or directory|Permission denied|cannot execute.*)$",
    rf"^(?:\S*/)?\w*sh: {_PROGRAM}: (?:No such file or directory|Permission denied|cannot execute.*)$",
    rf"^\S+: \d+: (?:{_PROGRAM}: (?:not found|Permission denied)|(?:\.: )?(?:cannot|can't) open .*)$",
    r"^\S*python[\d.]*: (?:No module named \S+|can't open file .*|Error while finding module .*)$",
    r"^(?:\S*/)?(?:env|timeout|xargs|nice|nohup|stdbuf|time|sudo): .*(?:No such file or directory|not found)$",
    r"^g?make(?:\[\d+\])?: .*(?:No rule to make target|No targets specified|No such file or directory|Error 127).*$",
    r"^npm (?:ERR!|error) .*(?:Missing script|could not determine executable).*$",
    r"^ERROR: Error importing plugin .*$",
    r"^.*\b(?:Could not resolve host|Temporary failure (?:in name resolution|resolving)|Network is unreachable|"
    r"getaddrinfo (?:ENOTFOUND|EAI_AGAIN)|Name or service not known|dial tcp: lookup|dns error).*$",
)
"""Messages of shells and of programs that start others, and of programs without network."""
_MAKE_DID_NOTHING = re.compile(r"(?:g?make(?:\[\d+\])?: .*(?:\n+|$))+")
_COUNTS_IN = [re.compile(pattern, re.MULTILINE) for pattern in _COUNTS]
_NONE_IN = re.compile("|".join(_NONE), re.MULTILINE | re.IGNORECASE)
_MISSING_IN = re.compile("|".join(_MISSING), re.MULTILINE | re.IGNORECASE)


def count_printed_tests(log: str) -> int | None:
    """Return how many tests ran by the lines of known runners, None if there is no such line."""
    log = _excerpt(log)
    found = [match for pattern in _COUNTS_IN for match in pattern.finditer(log)]
    if not found:
        return 0 if _NONE_IN.search(log) or _MAKE_DID_NOTHING.fullmatch(log) else None
    return sum(-int(match["minus"]) if "minus" in match.re.groupindex else int(match[1] or 1) for match in found)


def find_missing_program(log: str) -> str:
    """Return the first line that says that a program, a script or the network was not there, empty if none does."""
    found = _MISSING_IN.search(_excerpt(log))
    return found[0].strip()[:300] if found else ""


def _excerpt(log: str) -> str:
    """Return the log's begin and end with short lines: the code under test decides what is searched here."""
    ends = log if len(log) <= 2 * _MAX_CHARACTERS else f"{log[:_MAX_CHARACTERS]}\n{log[-_MAX_CHARACTERS:]}"
    return "\n".join(line[:_MAX_LINE] for line in ends.splitlines())
