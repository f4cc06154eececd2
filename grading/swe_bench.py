"""Grader `swe_bench`: every fail-to-pass and every pass-to-pass test of the row must pass.

SWE-bench Verified and Multilingual, SWE-smith- and R2E-like rows carry these lists, the command that runs the tests
(`test_cmd`) and the name of a log parser. Outcomes are the witness's under pytest, else the log's.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Self

from grading.base import TestFiles, TestRun, Verdict, log_tail, tests_user
from grading.diff_sections import split_diff
from grading.eval_cmd import listed_test_files, names_pytest, reason_unfinished, require_canary, require_evidence
from grading.evidence import all_tests, find_gap, has_passed, judge_runner, look_up, worst_outcomes
from grading.log_parsers import find_log_parser
from grading.oracle import Oracle
from grading.run_hidden_tests import RunnerReport, run_tests
from ratchet.types import JsonObject
from sandboxes.base import Sandbox


class SweBenchGrader:
    name = "swe_bench"
    version = "4"

    def test_files(self, spec: JsonObject) -> TestFiles:
        """Return the files of `test_patch`, `test_files` and `tests_archive`."""
        patch = str(spec["swe_bench"].get("test_patch") or "").encode()
        listed = listed_test_files(spec)
        paths = {change.path for change in split_diff(patch)} | (listed.paths or set())
        return TestFiles(frozenset(paths), listed.archive, patch)

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        row = spec["swe_bench"]
        started = time.monotonic()
        observed = await run_tests(box, row["test_cmd"], workdir, limit_seconds, user=tests_user(spec))
        outcomes = await asyncio.to_thread(outcomes_of, observed, row)
        gap = TestLists.of_row(row).find_gap(observed, outcomes, names_pytest(row["test_cmd"]))
        return TestRun(observed, outcomes, time.monotonic() - started, limit_seconds, gap)

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        row = spec["swe_bench"]
        return judge_lists(run, TestLists.of_row(row), oracle, names_pytest(row["test_cmd"]))


@dataclass(slots=True, frozen=True)
class TestLists:
    """Tests that fail without a solution and pass with one, and tests that always pass."""

    __test__ = False

    fail_to_pass: list[str]
    pass_to_pass: list[str]

    @classmethod
    def of_row(cls, row: JsonObject) -> Self:
        """Return the lists of `metadata.swe_bench` or `metadata.swepro`."""
        return cls(row["fail_to_pass"], row["pass_to_pass"])

    def find_gap(self, observed: RunnerReport, outcomes: dict[str, str], required: bool) -> str:
        """Return why a run shows nothing of the patch: none of the listed tests ran, and no other test failed."""
        if not self.fail_to_pass:
            return "the row names no test that fails without a solution"
        seen = list(look_up(outcomes, [*self.fail_to_pass, *self.pass_to_pass]).values())
        seen += [outcome for outcome in outcomes.values() if outcome == "failed"]
        return find_gap(observed, seen, required, by_name=True)


def outcomes_of(observed: RunnerReport, row: JsonObject) -> dict[str, str]:
    """Return name → outcome, of the witness or else the log. Raises GraderFailedError without a parser that works."""
    if observed.sessions:
        return all_tests(observed)
    return find_log_parser(str(row.get("log_parser") or "pytest"), row)(observed.log)


def judge_lists(run: TestRun, lists: TestLists, oracle: Oracle | None, required: bool) -> Verdict:
    """Judge by two lists of tests: solved if all of both passed and the runner was not tampered with.

    `required`: pytest must have run, because the command names it; a printed log alone does not count then. Raises
    GraderFailedError if the box was starved of CPU, and NoEvidenceError.
    """
    outcomes = worst_outcomes(run.outcomes, run.observed, oracle)
    tests = look_up(outcomes, [*lists.fail_to_pass, *lists.pass_to_pass])
    unfinished = reason_unfinished(run)
    truthful = judge_runner(run.observed, oracle, required)
    gap = "" if unfinished or truthful.rule else require_evidence(run, oracle)
    fixed = _passed(lists.fail_to_pass, tests, oracle, may_xfail=False)
    kept = _passed(lists.pass_to_pass, tests, oracle, may_xfail=True)
    if not truthful.ok:  # the counts of a changed runner are worthless
        fixed, kept = [], []
    wrong = next((name for name in tests if name not in {*fixed, *kept}), None)
    counts = (
        f"{len(fixed)}/{len(lists.fail_to_pass)} fail-to-pass and {len(kept)}/{len(lists.pass_to_pass)} pass-to-pass "
        "tests passed"
    )
    solved = not unfinished and not gap and truthful.ok and bool(tests) and wrong is None
    if solved:
        require_canary(run, oracle)
    return Verdict(
        solved=solved,
        reason=unfinished
        or gap
        or truthful.reason
        or counts + ("" if wrong is None else f"; first wrong: {wrong} ({tests[wrong]})"),
        log=log_tail(run.observed.log),
        duration_seconds=run.seconds,
        rejected=bool(truthful.rule),
        rule=truthful.rule,
        tests=tests,
        fail_to_pass=(len(fixed), len(lists.fail_to_pass)),
        pass_to_pass=(len(kept), len(lists.pass_to_pass)),
        has_oracle=oracle is not None,
    )


def _passed(names: list[str], tests: dict[str, str], oracle: Oracle | None, may_xfail: bool) -> list[str]:
    return [name for name in names if has_passed(name, tests[name], oracle, may_xfail)]
