"""Grader `eval_cmd`: the task's command, exit code 0 is solved.

Why here: any command can be a test, and it is the quickstart's grader.
Called by: `activities/grade.py`.

An exit code alone is easily faked, so where the command runs pytest its witness has to agree (`evidence.py`). For any other runner the
exit code of the command is all there is; `docs/integrity.md` says what that is worth.
"""

import base64
import binascii
import re
import time
from typing import Any

from activities.graders.base import TestFiles, Verdict, tail
from activities.graders.test_evidence import Judgement, all_tests, judge_sessions
from activities.graders.test_runner import RunnerReport, run_tests
from activities.sandboxes.base import Sandbox
from ratchet.errors import GraderFailedError

# A shell's own words for "not executable" and "not found": the command never ran, so there is no verdict.
_COULD_NOT_RUN = (126, 127)
_NAMES_PYTEST = re.compile(r"\b(?:pytest|py\.test)\b")


class EvalCmdGrader:
    name = "eval_cmd"
    version = "2"

    def test_files(self, spec: dict[str, Any]) -> TestFiles:
        return listed_test_files(spec)

    async def grade(self, box: Sandbox, workdir: str, spec: dict[str, Any], timeout_seconds: float) -> Verdict:
        """A time-out of the tests is a verdict: not solved, unless the box was starved of CPU."""
        return await grade_command(box, spec["eval_cmd"], workdir, spec, timeout_seconds)


def listed_test_files(spec: dict[str, Any]) -> TestFiles:
    """`metadata.test_files` names them, `metadata.tests_archive` (tar.gz, base64) holds them; neither is required of an eval_cmd."""
    paths = spec.get("test_files")
    try:
        archive = base64.b64decode(spec.get("tests_archive") or "", validate=True)
    except binascii.Error as error:
        raise GraderFailedError(f"metadata.tests_archive is no base64: {error}") from error
    return TestFiles(frozenset(paths) if paths is not None else None, archive)


async def grade_command(
    box: Sandbox, command: str, workdir: str, spec: dict[str, Any], timeout_seconds: float
) -> Verdict:
    own = spec.get("integrity") or {}
    witness = bool(own.get("witness", True))
    started = time.monotonic()
    observed = await run_tests(box, command, workdir, timeout_seconds, witness)
    seconds, log = time.monotonic() - started, tail(observed.log)
    ended = not_ended(observed, timeout_seconds)
    if ended:
        return Verdict(False, ended, log, seconds, tests=all_tests(observed))
    if observed.exit_code in _COULD_NOT_RUN and not observed.sessions:
        raise GraderFailedError(f"eval_cmd could not run (exit code {observed.exit_code}): {log.strip()[-400:]}")
    required = witness and _NAMES_PYTEST.search(command) is not None
    judged = judge_sessions(observed, required, spec.get("expected_tests") or ())
    return _verdict(observed, judged, log, seconds)


def not_ended(observed: RunnerReport, timeout_seconds: float) -> str:
    """Why the command gave no exit code, empty if it did. Raises GraderFailedError where the machine and not the patch is to blame."""
    if observed.starved:
        raise GraderFailedError(
            f"the tests stood in line for a core most of their {timeout_seconds:.0f} s; the box was starved of CPU"
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
