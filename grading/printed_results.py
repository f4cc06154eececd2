"""Read from the printed log of a test command how many tests ran, and which program it did not find.

A command that is judged by its exit code or reward file alone shows by nothing else that tests ran. The code under test
can print such lines, too; then a verdict is missing or rests on the exit code, as without them.
"""

import re
import tomllib
from importlib.resources import files

_TABLE: dict[str, list[str]] = tomllib.loads((files("grading") / "printed_results.toml").read_text())
MAX_CHARACTERS = 200_000
_MAX_LINE = 500
_MAKE_DID_NOTHING = re.compile(r"(?:g?make(?:\[\d+\])?: .*(?:\n+|$))+")
_COUNTS_IN = [re.compile(pattern, re.MULTILINE) for pattern in _TABLE["ran"]]
_RESULTS_IN = [*_COUNTS_IN, *(re.compile(pattern, re.MULTILINE) for pattern in _TABLE["result"])]
_NONE_IN = re.compile("|".join(_TABLE["none"]), re.MULTILINE | re.IGNORECASE)
_MISSING_IN = re.compile("|".join(_TABLE["missing"]), re.MULTILINE | re.IGNORECASE)


def count_printed_tests(log: str) -> int | None:
    """Return how many tests ran by the lines of known runners, None if there is no such line."""
    log = _excerpt(log)
    found = [match for pattern in _COUNTS_IN for match in pattern.finditer(log)]
    if not found:
        return 0 if _NONE_IN.search(log) or _MAKE_DID_NOTHING.fullmatch(log) else None
    return sum(int(match[1] or 1) * (-1 if match.lastgroup == "minus" else 1) for match in found)


def count_printed_results(log: str) -> int:
    """Return how often the log tells of at least one test that ran, also by lines of runners that are not known."""
    log = _excerpt(log)
    found = (match for pattern in _RESULTS_IN for match in pattern.finditer(log) if match.lastgroup != "minus")
    return sum(int(match[1] or 1) > 0 for match in found)


def find_missing_program(log: str) -> str:
    """Return the first line that says that a program, a script or the network was not there, empty if none does."""
    found = _MISSING_IN.search(_excerpt(log))
    return found[0].strip()[:300] if found else ""


def _excerpt(log: str) -> str:
    """Return the begin and end of a log with short lines: the code under test decides what is searched."""
    half = MAX_CHARACTERS // 2
    ends = log if len(log) <= MAX_CHARACTERS else f"{log[:half]}\n{log[-half:]}"
    return "\n".join(line[:_MAX_LINE] for line in ends.splitlines())
