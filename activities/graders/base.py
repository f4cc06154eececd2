"""What a grader is: a patched, fresh box goes in, a typed verdict comes out.

Why here: graders know boxes and tasks, and nothing of Temporal or the store.
Called by: `activities/grade.py`; implemented by one file per grader in this folder.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from activities.sandboxes.base import Sandbox

MAX_LOG_CHARACTERS = 200_000
PASSED = ("passed", "xfailed")
"""Outcomes that an expected test may have."""


@dataclass(slots=True, frozen=True)
class Verdict:
    """`rejected`: an integrity rule's verdict on the agent's own deed, named in `rule`.

    `tests`: name → passed, failed, skipped, xfailed, xpassed or missing, where the grader can tell. `fail_to_pass` and `pass_to_pass`:
    (passed, expected) of the task's lists, None where it has none.
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
    """Files of the task's tests, put in after the patch. `paths`: every file that is the task's and not the agent's.

    `archive`: a tar.gz unpacked at the repository's root. `patch`: a diff applied to those files as the base has them.
    `commands`: run as root afterwards.
    """

    __test__ = False

    paths: frozenset[str] | None = None
    archive: bytes = b""
    patch: bytes = b""
    commands: tuple[str, ...] = ()


class Grader(Protocol):
    """`version` changes whenever the same patch could be judged differently."""

    name: str
    version: str

    def test_files(self, spec: dict[str, Any]) -> TestFiles:
        """What has to be in the box beside the patch. Raises GraderFailedError where the row's own data cannot be read."""
        ...

    async def grade(self, box: Sandbox, workdir: str, spec: dict[str, Any], timeout_seconds: float) -> Verdict:
        """Runs the hidden tests in a fresh box in which the patch and the test files are.

        Raises GraderFailedError where the tests could not run, and the box's own errors.
        """
        ...


def tail(log: str) -> str:
    return (
        log
        if len(log) <= MAX_LOG_CHARACTERS
        else f"… ({len(log) - MAX_LOG_CHARACTERS} characters left out)\n{log[-MAX_LOG_CHARACTERS:]}"
    )
