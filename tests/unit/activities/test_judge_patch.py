"""Whose fault it is that a grading box gave no report, and what a solved patch is run against."""

from dataclasses import replace
from typing import Any, cast

import pytest

from activities.graders.base import TestRun
from activities.graders.broken_oracles import BrokenOracle
from activities.graders.oracle import Oracle
from activities.graders.registry import GRADERS
from activities.graders.run_hidden_tests import RunnerReport
from activities.grading_box import PreparedBox
from activities.judge_patch import GradingLimits, KnownRuns, PatchJudge, PatchRun
from activities.sandboxes.base import Sandbox
from ratchet.errors import GraderFailedError, SuspectPatchError
from tests.integration.activities import shop

LOST = PatchRun(PreparedBox(), TestRun(RunnerReport(1, "", [], lost=True), {}, 1.0, 60.0))


def _judge(grader: str, oracle: Oracle | None, tries_left: int) -> PatchJudge:
    return PatchJudge(
        GRADERS[grader], shop.task(grader, ""), GradingLimits(60, 60), KnownRuns(oracle), tries_left=tries_left
    )


@pytest.mark.parametrize("grader", ("eval_cmd", "swe_bench"))
@pytest.mark.parametrize("oracle", (None, Oracle()))
def test_a_lost_report_is_the_patchs_fault_only_if_every_box_loses_it(grader: str, oracle: Oracle | None) -> None:
    for tries_left in (2, 1):
        with pytest.raises(SuspectPatchError, match="the next box"):
            _judge(grader, oracle, tries_left).verdict(LOST, oracle)
    verdict = _judge(grader, oracle, 0).verdict(LOST, oracle)
    assert not verdict.solved and not verdict.rejected and "every box" in verdict.reason


class _HelperFails:
    """A grader whose own helper gives no result, as a service that refuses one call makes it."""

    def __init__(self, grader: str) -> None:
        self._grader = GRADERS[grader]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grader, name)

    async def run(self, *_: Any) -> TestRun:
        raise GraderFailedError("the parser gave no result")


@pytest.mark.parametrize("blame", ("", "the tests can be put in without the patch, but not with it"))
async def test_one_boxs_failure_makes_a_patch_suspect_and_that_of_every_box_not_solved(blame: str) -> None:
    prepared = PreparedBox(blame=blame)
    judges = [replace(_judge("eval_cmd", Oracle(), left), grader=_HelperFails("eval_cmd")) for left in (2, 1, 0)]
    box = cast(Sandbox, None)
    for judge in judges[:2]:
        with pytest.raises(SuspectPatchError, match="the next box"):
            await judge.run_tests(box, prepared)
    verdict = (await judges[2].run_tests(box, prepared)).not_run
    assert verdict is not None and not verdict.solved and (blame or "took away") in verdict.reason


async def test_a_failure_of_a_task_that_is_not_known_to_work_is_not_the_patchs() -> None:
    judge = replace(_judge("eval_cmd", None, 0), grader=_HelperFails("eval_cmd"))
    with pytest.raises(GraderFailedError, match="no result"):
        await judge.run_tests(cast(Sandbox, None), PreparedBox())


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
