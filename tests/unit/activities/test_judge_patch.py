"""Whose fault it is that a grading box gave no report, and what a solved patch is run against."""

import pytest

from activities.graders.base import TestRun
from activities.graders.broken_oracles import BrokenOracle
from activities.graders.oracle import Oracle
from activities.graders.registry import GRADERS
from activities.graders.run_hidden_tests import RunnerReport, UnusableBoxError
from activities.grading_box import PreparedBox
from activities.judge_patch import GradingLimits, KnownRuns, PatchJudge, PatchRun
from tests.integration.activities import shop

LOST = PatchRun(PreparedBox(), TestRun(RunnerReport(1, "", [], lost=True), {}, 1.0, 60.0))


@pytest.mark.parametrize("grader", ("eval_cmd", "swe_bench"))
@pytest.mark.parametrize("oracle", (None, Oracle()))
def test_a_lost_report_is_the_patchs_fault_only_if_every_box_loses_it(grader: str, oracle: Oracle | None) -> None:
    def judge(tries_left: int) -> PatchJudge:
        return PatchJudge(
            GRADERS[grader], shop.task(grader, ""), GradingLimits(60, 60), KnownRuns(oracle), tries_left=tries_left
        )

    for tries_left in (2, 1):
        with pytest.raises(UnusableBoxError, match="the next box"):
            judge(tries_left).verdict(LOST, oracle)
    verdict = judge(0).verdict(LOST, oracle)
    assert not verdict.solved and not verdict.rejected and "every box" in verdict.reason


def test_the_true_tests_are_repeated_at_a_random_place_among_the_control_runs() -> None:
    pool = {number: BrokenOracle((), {}, up=number % 2 == 0, must_fail=("a",)) for number in range(4)}
    known = KnownRuns(Oracle(), pool)
    found = [known.control_runs(grade_id) for grade_id in range(200)]
    assert {runs.index(None) for runs in found} == {0, 1, 2}
    for runs in found:
        broken = [number for number in runs if number is not None]
        assert len(runs) == 3 and [pool[number].up for number in broken] == [True, False]
    assert known.control_runs(7) == known.control_runs(7), "a retry makes the same runs"
    assert KnownRuns().control_runs(7) == [], "without a pool a verdict needs no control run"
