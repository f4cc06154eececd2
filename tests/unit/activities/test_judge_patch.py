"""Whose fault it is that a grading box gave no report."""

import pytest

from activities.graders.base import TestRun
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
