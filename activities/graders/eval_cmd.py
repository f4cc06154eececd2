"""Grader `eval_cmd`: run the task's command; exit code 0 means solved.

An exit code is easily faked. If the command runs pytest, the evidence of its witness must agree (`evidence.py`), and if
the task was admitted, the tests that passed with the gold patch must have passed.
"""

import base64
import binascii
import re
import time

from activities.graders.base import TestFiles, TestRun, Verdict, log_tail
from activities.graders.evidence import Judgement, all_tests, judge_sessions
from activities.graders.oracle import Oracle
from activities.graders.run_hidden_tests import UnusableBoxError, run_tests
from activities.sandboxes.base import Sandbox
from ratchet.errors import GraderFailedError
from ratchet.types import JsonObject

_COULD_NOT_RUN = (126, 127)
"""A shell's exit codes for "not executable" and "not found"."""
_NAMES_PYTEST = re.compile(r"\b(?:pytest|py\.test)\b")


class EvalCmdGrader:
    """The grader of `metadata.eval_cmd`."""

    name = "eval_cmd"
    version = "3"

    def test_files(self, spec: JsonObject) -> TestFiles:
        return listed_test_files(spec)

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        return await run_test_command(box, spec["eval_cmd"], workdir, spec, limit_seconds)

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        return judge_command(run, spec["eval_cmd"], spec, oracle)


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


async def run_test_command(box: Sandbox, command: str, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
    """Run a test command, with the witness unless the row switches it off (`integrity.witness: false`)."""
    started = time.monotonic()
    observed = await run_tests(box, command, workdir, limit_seconds, _uses_witness(spec))
    return TestRun(observed, all_tests(observed), time.monotonic() - started, limit_seconds)


def _uses_witness(spec: JsonObject) -> bool:
    return bool((spec.get("integrity") or {}).get("witness", True))


def judge_command(run: TestRun, command: str, spec: JsonObject, oracle: Oracle | None) -> Verdict:
    """Judge a command's exit code and, if it runs pytest, the evidence of the witness.

    Raises GraderFailedError if the box was starved of CPU, or if the command could not start and no gold run shows that
    it can.
    """
    observed = run.observed
    log = log_tail(observed.log)
    unfinished = reason_unfinished(run)
    if unfinished:
        return Verdict(False, unfinished, log, run.seconds, tests=run.outcomes, has_oracle=oracle is not None)
    if observed.exit_code in _COULD_NOT_RUN and not observed.sessions and oracle is None:
        raise GraderFailedError(f"eval_cmd could not run (exit code {observed.exit_code}): {log.strip()[-400:]}")
    required = _uses_witness(spec) and names_pytest(command)
    judged = judge_sessions(observed, required, spec.get("expected_tests") or (), oracle)
    return _verdict(run, judged, log, oracle is not None)


def names_pytest(command: str) -> bool:
    """Return whether a test command names pytest, so that its witness must have reported."""
    return _NAMES_PYTEST.search(command) is not None


def reason_unfinished(run: TestRun) -> str:
    """Return why the command gave no exit code, empty if it gave one.

    Raises UnusableBoxError if the box was starved of CPU, which is not the patch's fault.
    """
    observed = run.observed
    if observed.starved:
        raise UnusableBoxError(
            f"the tests got less than half of a core during their {run.limit_seconds:.0f} s and waited for one most of "
            "the time; the box was starved of CPU"
        )
    if observed.lost:
        return "the tests took the supervision of every box down (memory, processes or disk used up)"
    return "" if observed.exit_code is not None else f"the tests took longer than {run.limit_seconds:.0f} s"


def _verdict(run: TestRun, judged: Judgement, log: str, has_oracle: bool) -> Verdict:
    exit_code = run.observed.exit_code
    solved = exit_code == 0 and judged.ok
    reason = judged.reason if judged.rule or (exit_code == 0 and not judged.ok) else f"exit code {exit_code}"
    return Verdict(
        solved,
        reason,
        log,
        run.seconds,
        rejected=bool(judged.rule),
        rule=judged.rule,
        tests=run.outcomes,
        has_oracle=has_oracle,
    )
