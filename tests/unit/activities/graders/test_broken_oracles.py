"""Broken oracles: which sources are changed, what a control run concludes, and what is stored."""

import json

import pytest

from activities.graders.base import TestRun
from activities.graders.broken_oracles import (
    BrokenOracle,
    ControlResult,
    Edit,
    apply_edits,
    broken_spec,
    judge_control,
    propose,
    spec_sources,
    validated,
)
from activities.graders.oracle import Oracle
from activities.graders.run_hidden_tests import RunnerReport
from ratchet.errors import GraderFailedError

TESTS = b"def test_a():\n    assert add(1, 1) == 2\n\n\ndef test_b():\n    assert add(2, 2) == 4\n"
COMMAND = (
    "dir=$(mktemp -d)\ncat > \"$dir/test_hidden.py\" <<'END'\ndef test_add():\n    assert add(1, 1) == 2\nEND\n"
    'python -m pytest "$dir/test_hidden.py"\n'
)


def run_of(outcomes: dict[str, str], exit_code: int | None = 1) -> TestRun:
    return TestRun(RunnerReport(exit_code, "", []), outcomes, 1.0, 60.0)


def test_each_wanted_test_gets_one_edit() -> None:
    for seed in range(10):
        broken = propose({"t.py": TESTS}, ["t.py::test_b[1]"], seed, False)
        assert broken is not None
        changed = apply_edits(broken, "t.py", TESTS)
        assert b"add(2, 2) == 4" not in changed and changed.count(b"\n") == TESTS.count(b"\n")
    assert propose({"t.py": b"x = 1\n"}, [], 0, False) is None
    assert propose({"t.py": b"def broken(:\n"}, [], 0, True) is None


def test_tests_inside_a_command_are_changed() -> None:
    spec = {"eval_cmd": COMMAND, "other": 1}
    assert set(spec_sources(spec)) == {"spec:eval_cmd"}
    broken = propose(spec_sources(spec), ["test_hidden.py::test_add"], 0, False)
    assert broken is not None
    changed = broken_spec(broken, spec)
    assert "== 2" not in changed["eval_cmd"] and "== " in changed["eval_cmd"] and changed["other"] == 1
    assert spec["eval_cmd"] == COMMAND, "the task's own row stays as it is"


def test_edits_are_made_for_one_source_only() -> None:
    broken = propose({"t.py": TESTS}, [], 0, False)
    assert broken is not None
    with pytest.raises(GraderFailedError, match="admit the task again"):
        apply_edits(broken, "t.py", TESTS + b"\n")


def test_only_what_the_gold_patch_fails_is_required() -> None:
    oracle = Oracle(outcomes={"a": "passed", "b": "passed", "c": "failed"}, exit_code=0)
    broken = BrokenOracle((Edit("t.py", 0, 1, "x"),), {"t.py": ""})
    found = validated(broken, oracle, run_of({"a": "failed", "b": "passed", "c": "failed"}))
    assert found.must_fail == ("a",) and found.exit_fails and found.is_valid
    assert not validated(broken, oracle, run_of({"a": "passed", "b": "passed"}, 0)).is_valid
    assert not validated(broken, oracle, run_of({}, 1)).is_valid, "a runner that crashes breaks no test"
    assert validated(broken, Oracle(exit_code=0), run_of({}, 2)).is_valid, "a command without names has its exit code"


def test_what_a_control_run_concludes() -> None:
    broken = BrokenOracle((), {}, must_fail=("a", "b"))
    assert judge_control(broken, run_of({"a": "failed", "b": "passed"})) == ControlResult(["b"], 1)
    assert judge_control(broken, run_of({"a": "failed", "b": "failed"})) == ControlResult([], 2)
    assert judge_control(broken, run_of({"a": "failed"})) == ControlResult([], 1)
    with pytest.raises(GraderFailedError, match="the tests that must fail"):
        judge_control(broken, run_of({}), tries_left=1)
    by_exit = BrokenOracle((), {}, exit_fails=True)
    assert judge_control(by_exit, run_of({}, 0)).passed == ["the test command"]
    assert judge_control(by_exit, run_of({}, 3)) == ControlResult([], 1)


def test_a_run_without_a_report_is_no_evidence() -> None:
    by_exit = BrokenOracle((), {}, exit_fails=True)
    lost = TestRun(RunnerReport(1, "", [], lost=True), {}, 1.0, 60.0)
    for silent in (lost, run_of({}, None)):
        with pytest.raises(GraderFailedError, match="without a report"):
            judge_control(by_exit, silent, tries_left=1)
        assert not judge_control(by_exit, silent).is_evidence, "in every box: the patch's doing"
        assert not validated(by_exit, Oracle(exit_code=0), silent).is_valid
    starved = TestRun(RunnerReport(None, "", [], starved=True), {}, 1.0, 60.0)
    with pytest.raises(GraderFailedError, match="without a report"):
        judge_control(by_exit, starved)
    named = BrokenOracle((), {}, must_fail=("a", "b"))
    assert judge_control(named, run_of({"a": "passed"}, None)).passed == ["a"], "it hung too late"


def test_it_survives_the_store() -> None:
    broken = BrokenOracle((Edit("t.py", 0, 1, "x"),), {"t.py": "d"}, False, ("a",), True)
    assert BrokenOracle.of_json(json.loads(json.dumps(broken.as_json()))) == broken


def test_numbers_become_larger_or_smaller() -> None:
    for number, numbers in ((0, {b"3", b"5"}), (1, {b"1", b"3"})):
        broken = propose({"t.py": TESTS}, ["test_a", "test_b"], number, False)
        assert broken is not None and broken.up == (number == 0)
        changed = apply_edits(broken, "t.py", TESTS)
        assert {line.rpartition(b"== ")[2] for line in changed.splitlines() if b"==" in line} == numbers


def test_without_names_one_assertion_is_changed_after_the_other() -> None:
    source = b"int main(void) {\n  CHECK_EQ(a(), 3);\n  CHECK_EQ(b(), 5);\n  CHECK_EQ(c(), 7);\n}\n"
    found = [propose({"t.c": source}, [], number, True) for number in range(6)]
    places = [broken.edits[0].start for broken in found if broken is not None and len(broken.edits) == 1]
    assert len(places) == 6 and places[::2] == places[1::2] and len(set(places)) == 3


def test_what_the_agent_can_know_is_not_changed() -> None:
    old = TESTS.partition(b"\n\n\ndef test_b")[0] + b"\n"
    for number in range(10):
        for wanted in (["t.py::test_b"], []):
            broken = propose({"t.py": TESTS}, wanted, number, not wanted, known={"t.py": old})
            assert broken is not None
            assert b"assert add(1, 1) == 2\n" in apply_edits(broken, "t.py", TESTS)
        named = propose({"t.py": TESTS}, ["t.py::test_b"], number, False)
        assert named is not None and b"assert add(1, 1) == 2\n" in apply_edits(named, "t.py", TESTS)
        wanted_line = propose({"t.py": TESTS}, ["t.py::test_b"], number, False, known={"t.py": TESTS})
        assert wanted_line is not None and b"add(2, 2) == 4" not in apply_edits(wanted_line, "t.py", TESTS)
