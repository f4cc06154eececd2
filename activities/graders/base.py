"""The contract of a grader: given a fresh box with the patch and the tests, return a typed verdict.

Each file of this folder that is named in `registry.py` implements it. Graders use boxes and a task's metadata, but
neither Temporal nor the store.
"""

from dataclasses import dataclass, field
from typing import Protocol

from activities.sandboxes.base import Sandbox
from ratchet.types import JsonObject

MAX_LOG_CHARACTERS = 200_000
PASSED = ("passed", "xfailed")
"""Outcomes with which an expected test counts as passed."""


@dataclass(slots=True, frozen=True)
class Verdict:
    """A judgement of one patch. `rejected`: an integrity rule, named in `rule`, rejected it.

    `tests`: name → passed, failed, skipped, xfailed, xpassed or missing; empty if the grader cannot tell.
    `fail_to_pass` and `pass_to_pass`: (passed, expected) of the task's lists, None without such a list.
    """

    solved: bool
    reason: str
    log: str
    duration_seconds: float
    rejected: bool = False
    rule: str = ""
    tests: dict[str, str] = field(default_factory=dict)
    fail_to_pass: tuple[int, int] | None = None
    pass_to_pass: tuple[int, int] | None = None


@dataclass(slots=True, frozen=True)
class TestFiles:
    """The task's test files, which are put into the box after the patch.

    `paths`: every file that belongs to the tests, None if the row does not list them. `archive`: a tar.gz that is
    unpacked at the repository's root. `patch`: a diff against the base. `commands`: run as root afterwards.
    """

    __test__ = False

    paths: frozenset[str] | None = None
    archive: bytes = b""
    patch: bytes = b""
    commands: tuple[str, ...] = ()


class Grader(Protocol):
    """Judges patches. `version` must change whenever the same patch could be judged differently."""

    name: str
    version: str

    def test_files(self, spec: JsonObject) -> TestFiles:
        """Return the files to put into the box after the patch. Raises GraderFailedError if the row cannot be read."""
        ...

    async def grade(self, box: Sandbox, workdir: str, spec: JsonObject, timeout_seconds: float) -> Verdict:
        """Run the hidden tests in a prepared box.

        Raises GraderFailedError if the tests could not run, and the box's own errors.
        """
        ...


def log_tail(log: str) -> str:
    """Return the log, of a longer one its last MAX_LOG_CHARACTERS characters."""
    return (
        log
        if len(log) <= MAX_LOG_CHARACTERS
        else f"… ({len(log) - MAX_LOG_CHARACTERS} characters left out)\n{log[-MAX_LOG_CHARACTERS:]}"
    )
