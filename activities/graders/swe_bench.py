"""Grader `swe_bench`: every fail-to-pass and every pass-to-pass test of the row must pass.

Why here: SWE-bench Verified and Multilingual, SWE-smith- and R2E-like rows carry these lists; the row also says how its tests are run
(`test_cmd`) and read (`log_parser`).
Called by: `activities/grade.py`.

Where the tests run under pytest its witness gives the outcomes; else the printed log does, through the named parser.
"""

import time
from typing import Any

from activities.graders.base import PASSED, TestFiles, Verdict, tail
from activities.graders.eval_cmd import listed_test_files, not_ended
from activities.graders.log_parsers import parser
from activities.graders.patches import split
from activities.graders.test_evidence import all_tests, is_runner_truthful, look_up
from activities.graders.test_runner import RunnerReport, run_tests
from activities.sandboxes.base import Sandbox


class SweBenchGrader:
    name = "swe_bench"
    version = "2"

    def test_files(self, spec: dict[str, Any]) -> TestFiles:
        """The files of `test_patch`, beside `test_files` and `tests_archive` where the row has them."""
        patch = str(spec["swe_bench"].get("test_patch") or "").encode()
        listed = listed_test_files(spec)
        paths = {change.path for change in split(patch)} | (listed.paths or set())
        return TestFiles(frozenset(paths), listed.archive, patch)

    async def grade(self, box: Sandbox, workdir: str, spec: dict[str, Any], timeout_seconds: float) -> Verdict:
        row = spec["swe_bench"]
        started = time.monotonic()
        observed = await run_tests(box, row["test_cmd"], workdir, timeout_seconds)
        seconds = time.monotonic() - started
        outcomes = outcomes_of(observed, str(row.get("log_parser") or "pytest"))
        return judge_lists(observed, outcomes, row["fail_to_pass"], row["pass_to_pass"], timeout_seconds, seconds)


def outcomes_of(observed: RunnerReport, log_parser: str) -> dict[str, str]:
    return all_tests(observed) if observed.sessions else parser(log_parser)(observed.log)


def judge_lists(
    observed: RunnerReport,
    outcomes: dict[str, str],
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    timeout_seconds: float,
    seconds: float,
) -> Verdict:
    """Counts the two lists; solved is all of both, and a runner that told the truth."""
    tests = {name: look_up(outcomes, name) for name in [*fail_to_pass, *pass_to_pass]}
    ended, believed = not_ended(observed, timeout_seconds), is_runner_truthful(observed)
    counts = [(sum(tests[name] in PASSED for name in names), len(names)) for names in (fail_to_pass, pass_to_pass)]
    if not believed.ok:  # what a changed runner counted is worth nothing
        counts = [(0, expected) for _, expected in counts]
    reason = ended or believed.reason or _count(counts, tests)
    solved = not ended and believed.ok and all(passed == expected for passed, expected in counts) and bool(tests)
    return Verdict(
        solved,
        reason,
        tail(observed.log),
        seconds,
        bool(believed.rule),
        believed.rule,
        tests,
        fail_to_pass=counts[0],
        pass_to_pass=counts[1],
    )


def _count(counts: list[tuple[int, int]], tests: dict[str, str]) -> str:
    text = f"{counts[0][0]}/{counts[0][1]} fail-to-pass and {counts[1][0]}/{counts[1][1]} pass-to-pass tests passed"
    wrong = next((f"; first wrong: {name} ({outcome})" for name, outcome in tests.items() if outcome not in PASSED), "")
    return text + wrong
