"""Parse printed test logs into name → outcome, for runners without a witness.

The lists of SWE-bench-like rows name tests as their runner prints them. The code under test can forge printed text, so
a log counts only if no witness reported; a name that was printed with two outcomes gets the worse one.
"""

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import islice
from types import SimpleNamespace

import structlog

from ratchet.errors import GraderFailedError, WorkerHostError
from ratchet.machine_faults import is_machine_fault
from ratchet.types import JsonObject

Parser = Callable[[str], dict[str, str]]
_LOG = structlog.get_logger()

_PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED(?! \[\d+\])|XFAIL|XPASS)\s+(\S+)")
_MIGRATION = re.compile(r"^Applying \S+?\.\.\.")
"""Django prints this without a line end, before the name of the next test."""
_MAX_DOTS = 20
"""Dots of one line that may end the name of a test."""
_WORDS = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "failed",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XPASS": "xpassed",
}
_RANK = {"failed": 0, "missing": 1, "skipped": 2, "xpassed": 3, "xfailed": 4, "passed": 5}


def _worst(found: dict[str, str], name: str, outcome: str) -> None:
    known = found.get(name)
    found[name] = outcome if known is None else min(known, outcome, key=_RANK.__getitem__)


def pytest_summary(log: str) -> dict[str, str]:
    """Parse the short summary of `pytest -rA`."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        match = _PYTEST_LINE.match(line)
        if match:
            _worst(found, match[2], _WORDS[match[1]])
    return found


def unittest_verbose(log: str) -> dict[str, str]:
    """Parse `python -m unittest -v` and Django's runner: `test_x (module.Class) ... ok`."""
    found: dict[str, str] = {}
    name = ""
    for line in map(str.strip, log.splitlines()):
        if line.startswith("Ran "):  # the runner's own `OK` follows
            name = ""
        dots = [match.span() for match in islice(re.finditer(r" \.\.\. ", line), _MAX_DOTS)]
        # A docstring, which names a test, may have such dots, too, and so may what the test prints behind its name.
        parts = [(line[:start], line[end:]) for start, end in dots] or [(name, line)]
        named, outcome = next(
            ((one, told) for one, rest in parts if one and (told := _unittest_outcome(rest))), ("", "")
        )
        if named:
            _worst(found, _MIGRATION.sub("", named), outcome)
        # What a test prints stands between its name and its outcome, which then has a line of its own.
        name = "" if named == parts[0][0] else parts[0][0]
    for line in log.splitlines():
        if line.startswith(("FAIL: ", "ERROR: ")):
            _worst(found, line.split(": ", 1)[1].strip(), "failed")
    return found


def _unittest_outcome(text: str) -> str:
    word = text.strip()
    if word in ("ok", "OK"):
        return "passed"
    if word.startswith("skipped"):
        return "skipped"
    if word.startswith("expected failure"):
        return "xfailed"
    return "failed" if word in ("FAIL", "ERROR", "unexpected success") else ""


def sympy_classic(log: str) -> dict[str, str]:
    """Parse `bin/test -C --verbose`: `test_name ok`, with failures repeated below as `___ file:test_name ___`."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[0].startswith("test_") and parts[1].lower() in ("ok", "e", "f", "x", "s"):
            _worst(found, parts[0], {"ok": "passed", "x": "xfailed", "s": "skipped"}.get(parts[1].lower(), "failed"))
    for name in re.findall(r"^_+ \S+:(\S+) _+$", log, re.MULTILINE):
        _worst(found, name, "failed")
    return found


PARSERS: dict[str, Parser] = {
    "pytest": pytest_summary,
    "unittest": unittest_verbose,
    "django": unittest_verbose,
    "sympy": sympy_classic,
}
"""Parsers by name. Newer rows of the sets, and the package `swebench`, write `parse_log_` in front."""


def find_log_parser(name: str, row: JsonObject | None = None) -> Parser:
    """Return a parser by name: the one of the `swebench` package if that is installed, else one of `PARSERS`.

    `row`: its `instance_id` and `version` are what some of the package's parsers need. The package names its parsers
    by repository before version 5. The first call imports it, which takes seconds. Raises GraderFailedError for an
    unknown name; so does a parser that fails. Raises WorkerHostError if the machine hinders the import.
    """
    short = name.removeprefix("parse_log_")
    own = PARSERS.get(short)
    theirs = _of_package().get(name) or _of_package().get(f"parse_log_{short}")
    if theirs is not None:
        return _of_swebench(name, theirs, own, row or {})
    if own is None:
        raise GraderFailedError(
            f"no log parser {name!r}; there are {', '.join(PARSERS)}, and those of the package `swebench` if it imports"
        )
    return own


@cache
def _of_package() -> dict[str, Callable[..., dict[str, str]]]:
    try:
        module = import_module("swebench.harness.log_parsers")
    except Exception as error:  # an installed package may lack what it imports, or raise anything
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and is_machine_fault(error)):
            raise WorkerHostError(f"the worker's machine cannot import `swebench` now: {error!r}") from error
        _LOG.info("no log parsers of the package swebench: it is not imported", error=repr(error))
        return {}
    return {**getattr(module, "MAP_REPO_TO_PARSER", {}), **getattr(module, "PARSER_REGISTRY", {})}


def _of_swebench(name: str, parse: Callable[..., dict[str, str]], own: Parser | None, row: JsonObject) -> Parser:
    """Return a parser of the package. A failure that only `own` finds counts: the package takes the last line."""

    def run(log: str) -> dict[str, str]:
        spec = SimpleNamespace(instance_id=str(row.get("instance_id", "")), version=str(row.get("version", "")))
        try:
            found = {test: _WORDS.get(status, "failed") for test, status in parse(log, spec).items()}
        except Exception as error:  # the package's code may raise anything
            raise GraderFailedError(f"the log parser {name!r} failed: {type(error).__name__}: {error}") from error
        failed = {test for test, outcome in (own(log) if own else {}).items() if outcome == "failed"}
        return found | dict.fromkeys(failed & found.keys(), "failed")

    return run
