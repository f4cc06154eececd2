"""Grader `eval_cmd`: run the task's command; solved is exit code 0, or for Harbor's verifier a reward of at least 1.

Both are easily faked. If the command runs pytest, the evidence of its witness must agree (`evidence.py`), and if the
task was admitted, the tests that passed with the gold patch must have passed. A run without evidence is no verdict.
"""

import re
import time
from dataclasses import replace

from grading.base import (
    NoEvidenceError,
    TestFiles,
    TestRun,
    Verdict,
    decode_archive,
    log_tail,
    reward_number,
    tests_user,
)
from grading.evidence import Judgement, all_tests, find_gap, judge_sessions, lacks_canary
from grading.oracle import Oracle
from grading.printed_results import count_printed_tests
from grading.reward_file import HARBOR, lay_out_tests, read_reward
from grading.run_hidden_tests import UnusableBoxError, run_tests
from ratchet.types import JsonObject
from sandboxes.base import Sandbox

_UNCHECKED = (
    "the test command ended with {} and printed no line of a test runner that is known here: admit the task (`ratchet "
    "tasks admit`), or set `empty_patch_fails: true` in its row if the command has been seen to fail without a solution"
)
_NO_CANARY = (
    "no canary ran that shows that the runner still reports failures, because this pytest or tests in no Python module "
    "have no place for it, or a conftest.py skips it: admit the task (`ratchet tasks admit`)"
)
_NAMES_PYTEST = re.compile(r"\b(?:pytest|py\.test)\b")


class EvalCmdGrader:
    name = "eval_cmd"
    version = "6"

    def test_files(self, spec: JsonObject) -> TestFiles:
        return listed_test_files(spec)

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        command = spec["eval_cmd"]
        if spec.get("verifier") == HARBOR:
            await lay_out_tests(box, workdir, spec.get("test_files") or (), tests_user(spec))
        run = await run_test_command(box, command, workdir, spec, limit_seconds, names_pytest(command))
        is_finished = run.observed.exit_code is not None and not run.observed.lost
        return await _with_reward(box, run) if is_finished and spec.get("verifier") == HARBOR else run

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        return judge_command(run, spec["eval_cmd"], spec, oracle)


def listed_test_files(spec: JsonObject) -> TestFiles:
    """Return the row's `test_files` and `tests_archive` (tar.gz, base64). Raises GraderFailedError for no base64."""
    paths = spec.get("test_files")
    return TestFiles(frozenset(paths) if paths is not None else None, decode_archive(spec, "tests_archive"))


async def run_test_command(
    box: Sandbox, command: str, workdir: str, spec: JsonObject, limit_seconds: float, needs_pytest: bool
) -> TestRun:
    """Run a test command, with the witness unless the row has it off. `needs_pytest`: only its tests count."""
    started = time.monotonic()
    witness = _uses_witness(spec)
    observed = await run_tests(box, command, workdir, limit_seconds, witness, tests_user(spec))
    outcomes = all_tests(observed)
    gap = find_gap(observed, outcomes.values(), by_witness=needs_pytest and witness)
    is_silent = not observed.top_sessions and not outcomes and not count_printed_tests(observed.log)
    if not gap and is_silent and needs_pytest and not witness:
        gap = "pytest printed no test that ran"
    return TestRun(observed, outcomes, time.monotonic() - started, limit_seconds, gap, is_silent=is_silent)


async def _with_reward(box: Sandbox, run: TestRun) -> TestRun:
    """Return the run with the reward in place of the exit code, which means nothing in Harbor's format."""
    reward = await read_reward(box)
    is_solved = reward.values is not None and reward_number(reward.values) >= 1
    run = replace(run, observed=replace(run.observed, exit_code=int(not is_solved)), rewards=reward.values)
    if reward.values is None:
        return replace(run, gap=reward.text)
    gap = find_gap(run.observed, run.outcomes.values())
    return replace(run, gap=f"{reward.text}, but {gap}" if gap else "", claim=reward.text)


def _uses_witness(spec: JsonObject) -> bool:
    return bool((spec.get("integrity") or {}).get("witness", True))


def judge_command(run: TestRun, command: str, spec: JsonObject, oracle: Oracle | None) -> Verdict:
    """Judge exit code and pytest's evidence. GraderFailedError if starved of CPU; NoEvidenceError if without any."""
    observed = run.observed
    log = log_tail(observed.log)
    unfinished = reason_unfinished(run)
    if unfinished:
        return Verdict(False, unfinished, log, run.seconds, tests=run.outcomes, has_oracle=oracle is not None)
    required = _uses_witness(spec) and names_pytest(command)
    judged = judge_sessions(observed, required, spec.get("expected_tests") or (), oracle)
    if (
        not (run.gap or run.claim or judged.rule)
        and run.is_silent
        and oracle is None
        and not spec.get("empty_patch_fails")
    ):
        raise NoEvidenceError(_UNCHECKED.format(observed.exit_code), observed.log, observed.exit_code != 0)
    if run.gap and not judged.rule:
        judged = Judgement(False, require_evidence(run, oracle))
    return _verdict(run, judged, log, oracle)


def require_canary(run: TestRun, oracle: Oracle | None) -> None:
    """Raise NoEvidenceError if the tests passed, but nothing shows that this runner reports a failure."""
    if lacks_canary(run.observed, oracle):
        raise NoEvidenceError(_NO_CANARY, run.observed.log, has_failed=False)


def require_evidence(run: TestRun, oracle: Oracle | None) -> str:
    """Return the run's gap, the patch's if gold runs had none. Raises NoEvidenceError for a gap without oracle."""
    if run.gap and oracle is None:
        raise NoEvidenceError(run.gap, run.observed.log)
    return run.gap


def names_pytest(command: str) -> bool:
    """Return whether a test command names pytest, so that its witness must have reported."""
    return _NAMES_PYTEST.search(command) is not None


def reason_unfinished(run: TestRun) -> str:
    """Return why there is no exit code, empty if there is one. Raises UnusableBoxError for too little CPU."""
    observed = run.observed
    if observed.starved:
        raise UnusableBoxError(
            f"the tests got less than half of a core during their {run.limit_seconds:.0f} s and waited for one most of "
            "the time; the box was starved of CPU"
        )
    if observed.lost:
        return "the test process died before it reported (memory, processes or disk used up)"
    return "" if observed.exit_code is not None else f"the tests took longer than {run.limit_seconds:.0f} s"


def _verdict(run: TestRun, judged: Judgement, log: str, oracle: Oracle | None) -> Verdict:
    exit_code = run.observed.exit_code
    solved = exit_code == 0 and judged.ok
    if solved:
        require_canary(run, oracle)
    reason = run.claim or f"exit code {exit_code}"
    if judged.rule or run.gap or (exit_code == 0 and not judged.ok):
        reason = judged.reason
    return Verdict(
        solved,
        reason,
        log,
        run.seconds,
        rejected=bool(judged.rule),
        rule=judged.rule,
        tests=run.outcomes,
        has_oracle=oracle is not None,
        rewards=run.rewards,
    )
