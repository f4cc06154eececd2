"""Blame for a grading box that gave no report, and the runs that check a solved patch."""

from dataclasses import replace
from typing import Any, cast

import pytest

from grading.base import TestRun
from grading.broken_oracles import BrokenOracle
from grading.diff_sections import split_diff
from grading.grading_box import PreparedBox
from grading.judge_patch import GradingLimits, KnownRuns, PatchJudge, PatchRun
from grading.oracle import Oracle, name_digest
from grading.registry import GRADERS
from grading.run_hidden_tests import RunnerReport, RunnerSession
from ratchet.errors import GraderFailedError, SuspectPatchError
from ratchet.types import Suspicion
from sandboxes.base import Sandbox
from tests.integration.grading import shop


def _run(exit_code: int | None, sessions: list[RunnerSession] | None = None, **more: Any) -> PatchRun:
    """Return what a box saw that was prepared: the command's exit code and the sessions of pytest."""
    report = RunnerReport(exit_code, "", sessions or [], **more)
    outcomes = {name: outcome for session in sessions or [] for name, outcome in session.tests.items()}
    return PatchRun(PreparedBox(), TestRun(report, outcomes, 1.0, 60.0))


def _session(exit: int | None, **tests: str) -> RunnerSession:
    return RunnerSession("token", 1, exit=exit, canary="failed", tests=tests)


SHOWS_NO_FAILED_TEST = {
    "the root shell of the tests was killed": _run(1, lost=True),
    "time is over": _run(None),
    "time is over after tests that passed": _run(None, [_session(None, a="passed")]),
    "the kernel killed the command": _run(137),
    "the kernel killed the runner": _run(137, [_session(None, a="passed")]),
    "a crash": _run(139),
    "the shell did not find the command": _run(127, [_session(0, a="passed")]),
    "the command is not executable": _run(126, [_session(0, a="passed")]),
    "a command that names no test": _run(1),
    "a tool that hides the signal": _run(2),
    "the runner broke": _run(3, [_session(3)]),
    "the runner was killed and the script went on": _run(1, [_session(None, a="passed")]),
    "the runner was interrupted": _run(2, [_session(2)]),
    "a worker of xdist died": _run(1, [replace(_session(1, a="passed"), num_missed=1)]),
    "a test was skipped": _run(1, [_session(0, a="skipped")]),
}
SHOWS_ONE = {
    "a test failed": _run(1, [_session(1, a="failed")]),
    "a test failed before the time was over": _run(None, [_session(None, a="failed")]),
    "a test failed before the runner was killed": _run(137, [_session(None, a="failed")]),
    "a file of tests cannot be imported": _run(2, [_session(2, **{"tests/test_a.py": "failed"})]),
}


def _judge(grader: str, oracle: Oracle | None, is_final: bool, *seen: Suspicion) -> PatchJudge:
    """Return a judge whose box decides alone (`is_final`), or only about what an earlier box has `seen`."""
    suspected = frozenset(Suspicion if is_final else seen)
    return PatchJudge(
        GRADERS[grader], shop.task(grader, ""), GradingLimits(60, 60), KnownRuns(oracle), suspected=suspected
    )


@pytest.mark.parametrize("oracle", (None, Oracle()))
@pytest.mark.parametrize("run", SHOWS_NO_FAILED_TEST.values(), ids=SHOWS_NO_FAILED_TEST)
def test_without_a_failed_test_a_second_box_decides(run: PatchRun, oracle: Oracle | None) -> None:
    with pytest.raises(SuspectPatchError, match="a second box"):
        _judge("eval_cmd", oracle, is_final=False).verdict(run, oracle)
    verdict = _judge("eval_cmd", oracle, is_final=True).verdict(run, oracle)
    assert not verdict.solved and not verdict.rejected and "every" not in verdict.reason


OF_TWO_KINDS = [
    ("time is over", "the root shell of the tests was killed"),
    ("time is over", "a command that names no test"),
    ("a command that names no test", "the kernel killed the command"),
    ("the kernel killed the runner", "a test was skipped"),
]


@pytest.mark.parametrize("pair", OF_TWO_KINDS + [pair[::-1] for pair in OF_TWO_KINDS])
def test_a_box_decides_only_about_what_an_earlier_one_showed(pair: tuple[str, str]) -> None:
    first, second = (SHOWS_NO_FAILED_TEST[name] for name in pair)
    with pytest.raises(SuspectPatchError) as suspected:
        _judge("eval_cmd", None, False).verdict(first, None)
    with pytest.raises(SuspectPatchError):
        _judge("eval_cmd", None, False, suspected.value.suspicion).verdict(second, None)
    assert not _judge("eval_cmd", None, False, suspected.value.suspicion).verdict(first, None).solved


REFUSALS = [
    "[Errno 28] No space left on device: 'a'",
    "fork: Cannot allocate memory",
    "EIO: Input/output error",
    "Error: ENOSPC: no space left on device, write",
    "E   MemoryError",
    "RuntimeError: can't start new thread",
    "java.lang.OutOfMemoryError: unable to create native thread",
    "bash: fork: retry: Resource temporarily unavailable",
]


@pytest.mark.parametrize("line", REFUSALS)
def test_a_test_that_failed_on_a_machine_without_room_needs_a_second_box(line: str) -> None:
    failed = SHOWS_ONE["a test failed"]
    assert failed.run is not None
    run = failed._replace(run=replace(failed.run, observed=replace(failed.run.observed, log=f"E   {line}\n")))
    with pytest.raises(SuspectPatchError, match="the log says"):
        _judge("eval_cmd", None, is_final=False).verdict(run, None)
    assert not _judge("eval_cmd", None, False, Suspicion.REFUSED).verdict(run, None).solved


@pytest.mark.parametrize("run", SHOWS_ONE.values(), ids=SHOWS_ONE)
def test_a_failed_test_needs_no_second_box(run: PatchRun) -> None:
    verdict = _judge("eval_cmd", None, is_final=False).verdict(run, None)
    assert not verdict.solved


LISTED = dict.fromkeys((*shop.F2P, *shop.P2P), "passed")
NO_LISTED_TEST_FAILED = {
    "only a test that is not listed failed before the time was over": _run(None, [_session(None, other="failed")]),
    "only a test that is not listed failed before the report was lost": _run(
        1, [_session(1, other="failed")], lost=True
    ),
    "a listed test was skipped": _run(0, [_session(0, **LISTED | {shop.F2P[0]: "skipped"})]),
    "a listed test is missing": _run(0, [_session(0, **{shop.P2P[0]: "passed"})]),
    "a file of other tests cannot be imported": _run(2, [_session(2, **{"other.py": "failed"})]),
}


@pytest.mark.parametrize("run", NO_LISTED_TEST_FAILED.values(), ids=NO_LISTED_TEST_FAILED)
def test_only_a_listed_test_that_failed_needs_no_second_box(run: PatchRun) -> None:
    with pytest.raises(SuspectPatchError, match="a second box"):
        _judge("swe_bench", None, is_final=False).verdict(run, None)


@pytest.mark.parametrize("failed", (shop.F2P[0], shop.P2P[0], shop.TESTS))
def test_a_listed_test_or_its_file_fails(failed: str) -> None:
    run = _run(None, [_session(None, **{failed: "failed"})])
    assert not _judge("swe_bench", None, is_final=False).verdict(run, None).solved


def test_a_test_that_the_gold_runs_failed_does_not_count() -> None:
    oracle = Oracle(outcomes={"a": "failed", "b": "passed"})
    run = _run(None, [_session(None, a="failed")])
    with pytest.raises(SuspectPatchError, match="no test had failed"):
        _judge("eval_cmd", oracle, is_final=False).verdict(run, oracle)


@pytest.mark.parametrize("grader", ("eval_cmd", "swe_bench"))
def test_every_grader_asks_a_second_box_about_a_lost_report(grader: str) -> None:
    lost = SHOWS_NO_FAILED_TEST["the root shell of the tests was killed"]
    with pytest.raises(SuspectPatchError, match="a second box"):
        _judge(grader, None, is_final=False).verdict(lost, None)
    assert not _judge(grader, None, is_final=True).verdict(lost, None).solved


async def test_a_patch_that_git_refuses_once_is_suspect_only() -> None:
    refused = PreparedBox(applies=False, log="error: corrupt patch")
    with pytest.raises(SuspectPatchError, match="does not apply"):
        await _judge("eval_cmd", None, is_final=False).run_tests(cast(Sandbox, None), refused)
    again = await _judge("eval_cmd", None, is_final=True).run_tests(cast(Sandbox, None), refused)
    assert again.not_run is not None and not again.not_run.solved


async def test_a_machine_without_room_is_another_cause_than_a_patch_that_does_not_apply() -> None:
    """An admitted task's own program fails in the second box, because its disk is full."""
    suspected = _judge("eval_cmd", Oracle(), False, Suspicion.NOT_APPLIED, Suspicion.NOT_PREPARED)
    judge = replace(suspected, grader=_HelperFails("eval_cmd", "cp: error writing 'a': No space left on device"))
    with pytest.raises(SuspectPatchError) as raised:
        await judge.run_tests(cast(Sandbox, None), PreparedBox())
    assert raised.value.suspicion is Suspicion.REFUSED
    with pytest.raises(SuspectPatchError) as raised:
        judge = _judge("eval_cmd", Oracle(), False, Suspicion.NOT_PREPARED)
        await judge.run_tests(cast(Sandbox, None), PreparedBox(applies=False))
    assert raised.value.suspicion is Suspicion.NOT_APPLIED


class _HelperFails:
    """A grader whose own helper gives no result, as a service that refuses one call makes it."""

    def __init__(self, grader: str, reason: str = "the parser gave no result") -> None:
        self._grader = GRADERS[grader]
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grader, name)

    async def run(self, *_: Any) -> TestRun:
        raise GraderFailedError(self._reason)


@pytest.mark.parametrize("blame", ("", "the tests can be put in without the patch, but not with it"))
async def test_one_boxs_failure_makes_a_patch_suspect_and_that_of_two_not_solved(blame: str) -> None:
    prepared = PreparedBox(blame=blame)
    first, second = (
        replace(_judge("eval_cmd", Oracle(), is_final), grader=_HelperFails("eval_cmd")) for is_final in (False, True)
    )
    box = cast(Sandbox, None)
    with pytest.raises(SuspectPatchError, match="a second box"):
        await first.run_tests(box, prepared)
    verdict = (await second.run_tests(box, prepared)).not_run
    assert verdict is not None and not verdict.solved and (blame or "took away") in verdict.reason


async def test_a_failure_of_a_task_that_is_not_known_to_work_is_not_the_patchs() -> None:
    judge = replace(_judge("eval_cmd", None, is_final=False), grader=_HelperFails("eval_cmd"))
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


@pytest.mark.parametrize("exit_code", (0, 1, 5, 137))
def test_a_command_that_tells_of_no_test_decides_nothing_by_itself(exit_code: int) -> None:
    """`jest -t` whose filter matches nothing ends like a program that checks silently."""
    silent = _run(exit_code)
    silent = silent._replace(run=replace(cast(TestRun, silent.run), is_silent=True))
    task = shop.task("eval_cmd", "", eval_cmd="./check")
    judge = PatchJudge(GRADERS["eval_cmd"], task, GradingLimits(60, 60))
    with pytest.raises(GraderFailedError, match="empty_patch_fails"):
        judge.verdict(silent, None)
    known = replace(task, spec={**task.spec, "empty_patch_fails": True})
    for judge, oracle in (
        (PatchJudge(GRADERS["eval_cmd"], task, GradingLimits(60, 60)), Oracle()),
        (PatchJudge(GRADERS["eval_cmd"], known, GradingLimits(60, 60)), None),
    ):
        assert judge.verdict(silent, oracle).solved == (exit_code == 0)


def test_a_silent_command_that_succeeded_is_no_patchs_fault_whatever_it_printed() -> None:
    changes = split_diff(b"diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-1\n+2\n")
    task = shop.task("eval_cmd", "", eval_cmd="./check")
    judge = PatchJudge(GRADERS["eval_cmd"], task, GradingLimits(60, 60))

    def run(exit_code: int) -> PatchRun:
        report = RunnerReport(exit_code, 'File "src/a.py", line 1: checked\n', [])
        return PatchRun(PreparedBox(changes=changes), TestRun(report, {}, 1.0, 60.0, is_silent=True))

    with pytest.raises(GraderFailedError, match="empty_patch_fails"):
        judge.verdict(run(0), None)
    assert not judge.verdict(run(2), None).solved, "a compiler says which line of the patch is wrong"


def _changes(**paths: str) -> bytes:
    headers = {"added": "new file mode 100644\n", "changed": ""}
    return b"".join(
        f"diff --git a/{path} b/{path}\n{headers[kind]}--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+y\n".encode()
        for path, kind in paths.items()
    )


@pytest.mark.parametrize("lists_tests", [True, False])
def test_a_test_that_only_the_gold_patch_brings_binds_no_other_patch(lists_tests: bool) -> None:
    """The task's own tests stay, also if the gold patch changes them, and so do the base's that it leaves alone."""
    own = [shop.TESTS] if lists_tests else None
    task = shop.task("eval_cmd", "", test_files=own, tests_archive="")
    judge = PatchJudge(GRADERS["eval_cmd"], task, GradingLimits(60, 60))
    paths = ("shop/price.py", "tests/test_new.py", shop.TESTS, "tests/test_old.py")
    gold = _run(0, [_session(0, **{f"{path}::test_a": "passed" for path in paths})])
    gold.prepared.changes = split_diff(
        _changes(**{"shop/price.py": "changed", "tests/test_new.py": "added", shop.TESTS: "changed"})
    )
    assert judge.gold_oracle(gold).passed == [f"{path}::test_a" for path in paths[2:]]


_ALL = Oracle(dict.fromkeys(("t.py::a", "t.py::b", "t.py::c"), "passed"), num_sessions=2, canaries=("failed",))
_ALONE = (name_digest("t.py::a"), name_digest("t.py::b"))
_PASSED = {"t.py::a": "passed", "t.py::b": "passed"}
_NO_TEST = RunnerSession("token", 2, exit=5)


def _repetition(*sessions: RunnerSession, exit_code: int | None = 1) -> PatchRun:
    return _run(exit_code, list(sessions))._replace(selected=_ALONE)


def _judges() -> list[PatchJudge]:
    """Return judges of all tests that the gold runs passed, and of listed ones."""
    row = {"fail_to_pass": ["t.py::a"], "pass_to_pass": ["t.py::b", "t.py::c"], "test_patch": "", "test_cmd": shop.RUN}
    tasks = [shop.task("eval_cmd", ""), replace(shop.task("swe_bench", ""), spec={"swe_bench": row})]
    return [PatchJudge(GRADERS[task.grader], task, GradingLimits(60, 60), KnownRuns(_ALL)) for task in tasks]


@pytest.mark.parametrize("judge", _judges(), ids=("eval_cmd", "swe_bench"))
def test_a_repetition_is_judged_by_the_selected_tests(judge: PatchJudge) -> None:
    """A limit on the coverage of all tests lets a session end with 1, and one without a selected test ends with 5."""
    assert judge.verdict(_repetition(_session(1, **_PASSED), _NO_TEST), _ALL).solved
    for wrong in (
        [_session(0, **_PASSED)],
        [_session(0, **_PASSED), _NO_TEST, RunnerSession("token", 3, exit=0)],
        [_session(1, **_PASSED | {"t.py::b": "failed"}), _NO_TEST],
        [_session(0, **_PASSED | {"t.py::b": "skipped"}), _NO_TEST],
        [_session(0, **{"t.py::a": "passed"}), _NO_TEST],
        [_session(0, **_PASSED), RunnerSession("token", 2)],
        [replace(_session(0, **_PASSED), num_missed=1), _NO_TEST],
        [replace(_session(0, **_PASSED), canary="passed"), _NO_TEST],
        [_NO_TEST, _NO_TEST],
        [],
    ):
        assert not judge.verdict(_repetition(*wrong), _ALL).solved, wrong
    assert not judge.verdict(_repetition(_session(0, **_PASSED), _NO_TEST, exit_code=None), _ALL).solved
    silent = replace(judge, suspected=())
    with pytest.raises(SuspectPatchError, match="a second box"):
        silent.verdict(_repetition(_NO_TEST, _NO_TEST), _ALL)


def test_a_test_that_the_row_does_not_list_needs_not_pass_again() -> None:
    by_outcomes, by_list = _judges()
    row = {**by_list.task.spec["swe_bench"], "pass_to_pass": ["t.py::c"]}
    judge = replace(by_list, task=replace(by_list.task, spec={"swe_bench": row}))
    done = _repetition(_session(1, **_PASSED | {"t.py::b": "failed"}), _NO_TEST)
    assert judge.verdict(done, _ALL).solved and not by_outcomes.verdict(done, _ALL).solved
    row = {**row, "fail_to_pass": ["t.py::c"]}
    none_counts = replace(judge, task=replace(judge.task, spec={"swe_bench": row}))
    assert not none_counts.verdict(_repetition(_session(0, **_PASSED), _NO_TEST), _ALL).solved
