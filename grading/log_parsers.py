"""Parse printed test logs into name → outcome, for runners without a witness.

The lists of SWE-bench-like rows name tests as their runner prints them. The code under test can forge printed text, so
a log counts only if no witness reported; a name that was printed with two outcomes gets the worse one.
"""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from ratchet.errors import GraderFailedError

Parser = Callable[[str], dict[str, str]]

_PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S+)")
_UNITTEST_LINE = re.compile(r"^(.+?) \.\.\. (.*)$")
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
    for line in log.splitlines():
        match = _UNITTEST_LINE.match(line.strip())
        if match is not None:
            name = match[1]
        # What a test prints stands between its name and its outcome, which then has a line of its own.
        outcome = _unittest_outcome(match[2] if match else line)
        if name and outcome:
            _worst(found, name, outcome)
            name = ""
    for line in log.splitlines():
        if line.startswith(("FAIL: ", "ERROR: ")):
            _worst(found, line.split(": ", 1)[1].strip(), "failed")
    return found


def _unittest_outcome(text: str) -> str:
    word = text.strip()
    if word == "ok":
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
    "parse_log_pytest": pytest_summary,
    "parse_log_django": unittest_verbose,
    "parse_log_sympy": sympy_classic,
}
"""Parsers by name; newer rows of the sets use the last three names."""


def find_log_parser(name: str) -> Parser:
    """Return a parser by name: one of `PARSERS`, or one of the `swebench` package if that is installed.

    The package names its parsers by repository before version 5. Raises GraderFailedError for an unknown name.
    """
    if name in PARSERS:
        return PARSERS[name]
    if find_spec("swebench") is not None:
        module = import_module("swebench.harness.log_parsers")
        known = {**getattr(module, "MAP_REPO_TO_PARSER", {}), **getattr(module, "PARSER_REGISTRY", {})}
        if name in known:
            return _of_swebench(known[name])
    raise GraderFailedError(
        f"no log parser {name!r}; there are {', '.join(PARSERS)}, and with the package `swebench` installed its own"
    )


def _of_swebench(parse: Callable[..., dict[str, str]]) -> Parser:
    def run(log: str) -> dict[str, str]:
        return {name: _WORDS.get(status, "failed") for name, status in parse(log, None).items()}

    return run
