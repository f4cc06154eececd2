"""Grader `eval_cmd`: run the task's command; exit code 0 means solved.

An exit code is easily faked. If the command runs pytest, the evidence of its witness must agree (`evidence.py`);
for any other runner only the exit code counts (docs/integrity.md describes the consequences).
"""

import base64
import binascii
import re
import time

from activities.graders.base import TestFiles, Verdict, log_tail
from activities.graders.evidence import Judgement, all_tests, judge_sessions
from activities.graders.run_hidden_tests import RunnerReport, run_tests
from activities.sandboxes.base import Sandbox
from ratchet.errors import GraderFailedError
from ratchet.types import JsonObject

# A shell's exit codes for "not executable" and "not found": the command did not run, so there is no verdict.
_COULD_NOT_RUN = (126, 127)
_NAMES_PYTEST = re.compile(r"\b(?:pytest|py\.test)\b")


class EvalCmdGrader:
    """The grader of `metadata.eval_cmd`."""

    name = "eval_cmd"
    version = "2"

    def test_files(self, spec: JsonObject) -> TestFiles:
        return listed_test_files(spec)

    async def grade(self, box: Sandbox, workdir: str, spec: JsonObject, timeout_seconds: float) -> Verdict:
        """Run the command. A time-out means not solved, unless the box was starved of CPU."""
        return await grade_command(box, spec["eval_cmd"], workdir, spec, timeout_seconds)


def listed_test_files(spec: JsonObject) -> TestFiles:
    """Return the files of `metadata.test_files` and `metadata.tests_archive` (tar.gz, base64); both are optional.

    Raises GraderFailedError if the archive is not base64.
    """
    paths = spec.get("test_files")
    try:
        archive = base64.b64decode(spec.get("tests_archive") or "", validate=True)
    except binascii.Error as error:
        raise GraderFailedError(f"metadata.tests_archive is not base64: {error}") from error
    return TestFiles(frozenset(paths) if paths is not None else None, archive)


async def grade_command(box: Sandbox, command: str, workdir: str, spec: JsonObject, timeout_seconds: float) -> Verdict:
    """Run a test command and judge its exit code and, if it runs pytest, the evidence of the witness.

    Raises GraderFailedError if the command could not run or the box was starved of CPU.
    """
    own = spec.get("integrity") or {}
    witness = bool(own.get("witness", True))
    started = time.monotonic()
    observed = await run_tests(box, command, workdir, timeout_seconds, witness)
    seconds = time.monotonic() - started
    log = log_tail(observed.log)
    unfinished = reason_unfinished(observed, timeout_seconds)
    if unfinished:
        return Verdict(False, unfinished, log, seconds, tests=all_tests(observed))
    if observed.exit_code in _COULD_NOT_RUN and not observed.sessions:
        raise GraderFailedError(f"eval_cmd could not run (exit code {observed.exit_code}): {log.strip()[-400:]}")
    required = witness and _NAMES_PYTEST.search(command) is not None
    judged = judge_sessions(observed, required, spec.get("expected_tests") or ())
    return _verdict(observed, judged, log, seconds)


def reason_unfinished(observed: RunnerReport, timeout_seconds: float) -> str:
    """Return why the command gave no exit code, empty if it gave one.

    Raises GraderFailedError if the box was starved of CPU, which is not the patch's fault.
    """
    if observed.starved:
        raise GraderFailedError(
            f"the tests waited for a core most of their {timeout_seconds:.0f} s; the box was starved of CPU"
        )
    if observed.lost:
        return "the tests took the box's own supervision down (memory, processes or disk used up)"
    return "" if observed.exit_code is not None else f"the tests took longer than {timeout_seconds:.0f} s"


def _verdict(observed: RunnerReport, judged: Judgement, log: str, seconds: float) -> Verdict:
    solved = observed.exit_code == 0 and judged.ok
    reason = judged.reason if observed.exit_code == 0 and not judged.ok else f"exit code {observed.exit_code}"
    return Verdict(
        solved, reason, log, seconds, rejected=bool(judged.rule), rule=judged.rule, tests=all_tests(observed)
    )
