"""Grader `swe_bench`: every fail-to-pass and every pass-to-pass test of the row must pass.

SWE-bench Verified and Multilingual, SWE-smith- and R2E-like rows carry these lists, the command that runs the tests
(`test_cmd`) and the name of a log parser. If the tests run under pytest, its witness gives the outcomes, else the
printed log does.
"""

import time

from activities.graders.base import PASSED, TestFiles, Verdict, log_tail
from activities.graders.diff_sections import split_diff
from activities.graders.eval_cmd import listed_test_files, reason_unfinished
from activities.graders.evidence import all_tests, judge_runner, look_up
from activities.graders.log_parsers import find_log_parser
from activities.graders.run_hidden_tests import RunnerReport, run_tests
from activities.sandboxes.base import Sandbox
from ratchet.types import JsonObject


class SweBenchGrader:
    """The grader of `metadata.swe_bench`."""

    name = "swe_bench"
    version = "2"

    def test_files(self, spec: JsonObject) -> TestFiles:
        """Return the files of `test_patch`, `test_files` and `tests_archive`."""
        patch = str(spec["swe_bench"].get("test_patch") or "").encode()
        listed = listed_test_files(spec)
        paths = {change.path for change in split_diff(patch)} | (listed.paths or set())
        return TestFiles(frozenset(paths), listed.archive, patch)

    async def grade(self, box: Sandbox, workdir: str, spec: JsonObject, timeout_seconds: float) -> Verdict:
        row = spec["swe_bench"]
        started = time.monotonic()
        observed = await run_tests(box, row["test_cmd"], workdir, timeout_seconds)
        seconds = time.monotonic() - started
        outcomes = outcomes_of(observed, str(row.get("log_parser") or "pytest"))
        return judge_lists(observed, outcomes, row["fail_to_pass"], row["pass_to_pass"], timeout_seconds, seconds)


def outcomes_of(observed: RunnerReport, log_parser: str) -> dict[str, str]:
    """Return name → outcome from the witness, or from the printed log if there was no witness."""
    return all_tests(observed) if observed.sessions else find_log_parser(log_parser)(observed.log)


def judge_lists(
    observed: RunnerReport,
    outcomes: dict[str, str],
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    timeout_seconds: float,
    seconds: float,
) -> Verdict:
    """Judge by two lists of tests: solved if all of both passed and the runner was not tampered with."""
    tests = {name: look_up(outcomes, name) for name in [*fail_to_pass, *pass_to_pass]}
    unfinished = reason_unfinished(observed, timeout_seconds)
    truthful = judge_runner(observed)
    counts = [(sum(tests[name] in PASSED for name in names), len(names)) for names in (fail_to_pass, pass_to_pass)]
    if not truthful.ok:  # counts of a changed runner are worthless
        counts = [(0, expected) for _, expected in counts]
    reason = unfinished or truthful.reason or _count(counts, tests)
    solved = not unfinished and truthful.ok and all(passed == expected for passed, expected in counts) and bool(tests)
    return Verdict(
        solved,
        reason,
        log_tail(observed.log),
        seconds,
        rejected=bool(truthful.rule),
        rule=truthful.rule,
        tests=tests,
        fail_to_pass=counts[0],
        pass_to_pass=counts[1],
    )


def _count(counts: list[tuple[int, int]], tests: dict[str, str]) -> str:
    text = f"{counts[0][0]}/{counts[0][1]} fail-to-pass and {counts[1][0]}/{counts[1][1]} pass-to-pass tests passed"
    wrong = next((f"; first wrong: {name} ({outcome})" for name, outcome in tests.items() if outcome not in PASSED), "")
    return text + wrong
