"""The contract of a grader: run the hidden tests in a prepared box, and judge that run.

Each file of this folder that is named in `registry.py` implements it. Graders use boxes and a task's metadata, but
neither Temporal nor the store. Running and judging are apart, as control runs judge otherwise (`broken_oracles.py`).
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from grading.oracle import Oracle
from grading.run_hidden_tests import RunnerReport
from ratchet.errors import GraderFailedError
from ratchet.types import JsonObject
from sandboxes.base import Sandbox

MAX_LOG_CHARACTERS = 200_000


@dataclass(slots=True, frozen=True)
class Verdict:
    """A judgement of one patch. `rejected`: an integrity rule, named in `rule`, rejected it.

    `tests`: name → passed, failed, skipped, xfailed, xpassed or missing; empty if the grader cannot tell.
    `fail_to_pass` and `pass_to_pass`: (passed, expected) of the task's lists, None without such a list. `has_oracle`:
    the run was compared with the task's gold runs. `rewards`: numbers that the tests' script has written, by key.
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
    has_oracle: bool = False
    rewards: dict[str, float] | None = None


@dataclass(slots=True, frozen=True)
class TestRun:
    """One run of a task's test command. `outcomes`: test → passed, failed, skipped, xfailed or xpassed, from the
    witness or from the printed log; empty if neither names tests. `gap`: why the run shows nothing of the patch, empty
    if it has the evidence of its grader (`evidence.py`). `claim`: what the verdict rests on instead of the exit code;
    `rewards`: its numbers. `is_silent`: pytest did not run, and no printed line of a runner tells of a test."""

    __test__ = False

    observed: RunnerReport
    outcomes: dict[str, str]
    seconds: float
    limit_seconds: float
    gap: str = ""
    claim: str = ""
    is_silent: bool = False
    rewards: dict[str, float] | None = None


class NoEvidenceError(GraderFailedError):
    """A run shows nothing of the patch, and no gold run shows that it can. `log`: what it printed. `has_failed`: the
    command ended without success, so the patch may be to blame if the log names it."""

    def __init__(self, gap: str, log: str, has_failed: bool = True) -> None:
        super().__init__(f"{gap}; no test shows anything of the patch: {log.strip()[-400:] or 'nothing was printed'}")
        self.log = log_tail(log)
        self.has_failed = has_failed


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

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        """Run the hidden tests. Raises GraderFailedError if the box cannot run tests, and the box's own errors."""

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        """Judge a run; `oracle` None: not admitted. Raises GraderFailedError for a fault that is not the patch's."""


def tests_user(spec: JsonObject) -> str:
    """Return the user of the box that runs the tests."""
    return str(spec.get("tests_user") or "agent")


def decode_archive(spec: JsonObject, name: str) -> bytes:
    """Return `metadata.NAME`, an archive in base64; empty without one. Raises GraderFailedError for no base64."""
    try:
        return base64.b64decode(spec.get(name) or "", validate=True)
    except ValueError as error:
        raise GraderFailedError(f"metadata.{name} is not base64: {error}; pack it again") from error


def reward_number(rewards: Mapping[str, float]) -> float:
    """Return the one number that several stand for: that of the key `reward`, else the least. 1 and more is solved."""
    return rewards["reward"] if "reward" in rewards else min(rewards.values())


def log_tail(log: str) -> str:
    """Return the log, of a longer one its last MAX_LOG_CHARACTERS characters."""
    return (
        log
        if len(log) <= MAX_LOG_CHARACTERS
        else f"… ({len(log) - MAX_LOG_CHARACTERS} characters left out)\n{log[-MAX_LOG_CHARACTERS:]}"
    )
