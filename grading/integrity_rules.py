"""The integrity rules: which files of a patch could change the test runner.

The rules are data, in `rules.toml`. `patch_screening.py` applies those with `always` to every patch and the others to
patches that no control run checks. `ratchet tasks rules` prints them, and a verdict names the rule. A task may add
patterns of its own (`metadata.integrity`).
"""

import sys
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

Applies = Literal["any", "program", "shadow", "test", "data", "support", "called"]


@dataclass(slots=True, frozen=True)
class Rule:
    """One rule. `files`: patterns as in .gitignore, matched against the path from the repository's root.

    `applies` narrows the match: `program` only new executables and links; `task_tests.py` and `runner_programs.py`
    decide the others. `scope` "tests": only files that the runner of a test could read. `sections`: kind of settings
    file of which only the runner's part is restored (`runner_settings.py`).
    `source`: documentation of the runner. `always`: also for patches that control runs check.
    """

    name: str
    ecosystem: str
    why: str
    source: str
    files: tuple[str, ...] = ()
    applies: Applies = "any"
    scope: Literal["anywhere", "tests"] = "anywhere"
    sections: str = ""
    always: bool = False

    @property
    def action(self) -> str:
        """The treatment of a file that matches, in words for a report."""
        return "the runner's part is put back" if self.sections else "left out"


_TABLE: dict[str, Any] = tomllib.loads((files("grading") / "rules.toml").read_text())

RULES: tuple[Rule, ...] = tuple(Rule(**{**row, "files": tuple(row.get("files", ()))}) for row in _TABLE["rule"])

LISTED_TEST = RULES[0]
"""The rule of the task's own tests."""

SOURCES = tuple(_TABLE["sources"])
"""Patterns of files below test directories that are no data which tests read."""

ORDINARY_TESTS = tuple(_TABLE["ordinary"])
"""Patterns of files that hold tests and nothing that other tests use."""

TAMPERED = "runner_tampered"
"""The rule of a changed runner: a test that must fail was reported as passed. It concerns no file."""

CONTROL_RUN = "control_run"
"""The rule of a control run: tests passed against a broken oracle that they must fail. It concerns no file."""

SHADOWED_MODULES = frozenset(sys.stdlib_module_names) | {
    "pytest", "_pytest", "py", "pluggy", "iniconfig", "xdist", "execnet", "pytest_cov", "pytest_asyncio", "pytest_mock",
    "pytest_timeout", "pytest_django", "anyio", "coverage", "nose", "nose2", "testtools", "hypothesis",
    "_hypothesis_pytestplugin", "_hypothesis_ftz_detector", "pygments", "tomli", "exceptiongroup", "ratchet_witness",
}  # fmt: skip


def rules_table() -> list[dict[str, str]]:
    """Return the rules as rows of a report."""
    return [
        {
            "rule": rule.name,
            "ecosystem": rule.ecosystem,
            "files": ", ".join(rule.files) or "by what they can reach",
            "what happens": rule.action,
            "why": rule.why,
            "source": rule.source,
        }
        for rule in RULES
    ]
