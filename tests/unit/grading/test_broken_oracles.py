"""Broken oracles: which sources are changed, what a control run concludes, and what is stored."""

import json
from dataclasses import replace

import pytest

from grading.base import TestRun
from grading.broken_oracles import (
    BrokenOracle,
    ControlResult,
    Edit,
    EditedTest,
    apply_edits,
    broken_spec,
    confirmed_pool,
    judge_control,
    propose,
    selectable_tests,
    spec_sources,
    validated,
)
from grading.judge_patch import KnownRuns
from grading.oracle import Oracle, name_digest
from grading.run_hidden_tests import RunnerReport
from ratchet.errors import GraderFailedError, SuspectPatchError

TESTS = b"def test_a():\n    assert add(1, 1) == 2\n\n\ndef test_b():\n    assert add(2, 2) == 4\n"
COMMAND = (
    "dir=$(mktemp -d)\ncat > \"$dir/test_hidden.py\" <<'END'\ndef test_add():\n    assert add(1, 1) == 2\nEND\n"
    'python -m pytest "$dir/test_hidden.py"\n'
)


def run_of(outcomes: dict[str, str], exit_code: int | None = 1) -> TestRun:
    return TestRun(RunnerReport(exit_code, "", []), outcomes, 1.0, 60.0)


def test_each_wanted_test_gets_one_edit() -> None:
    for seed in range(8):
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


def test_a_flaky_test_beside_the_edited_ones_is_not_required() -> None:
    broken = propose({"tests/t.py": TESTS}, ["tests/t.py::test_b"], 0, False)
    assert broken is not None
    names = ["tests/t.py::test_a", "tests/t.py::test_b[1]", "tests/t.py::T::test_b", "tests/other.py::test_b"]
    oracle = Oracle(outcomes=dict.fromkeys(names, "passed"), exit_code=0)
    found = validated(broken, oracle, run_of(dict.fromkeys(names, "failed")))
    assert found.must_fail == ("tests/t.py::test_b[1]", "tests/t.py::T::test_b")
    only_another = validated(broken, oracle, run_of({"tests/t.py::test_a": "failed"}))
    assert not only_another.is_valid


def test_names_that_runners_give_to_python_tests() -> None:
    edited = EditedTest("tests/t.py", "test_b", "value")
    for name in (
        "tests/t.py::T::test_b[x::y]",
        "test_b (tests.t.T)",
        "test_b (tests.t.T.test_b)",
        "t.py::test_b",
        "test_b",
    ):
        assert edited.has(name), name
    for name in ("tests/t.py::test_b2", "test_a (tests.t.T)", "tests/u.py::test_b"):
        assert not edited.has(name), name


def test_tests_of_other_languages_are_found_by_their_names() -> None:
    edited = EditedTest("price_test.go", "TestDiscount", "value")
    assert edited.has("TestDiscount") and edited.has("shop/TestDiscount/rounds") and not edited.has("TestTotal")
    titled = EditedTest("a.test.js", "squares ${given}", "value")
    assert titled.has("squares 4") and not titled.has("cubes 4")
    assert EditedTest("a.test.js", "", "value").has("cubes 4"), "any may be meant if the name is unknown"


def test_a_neighbour_needs_the_other_one() -> None:
    near = (EditedTest("t.py", "test_a", "value"),)
    far = (EditedTest("t.py", "test_b", "refused"),)
    both = BrokenOracle((), {}, True, ("t.py::test_a", "t.py::test_b"), True, near + far)
    one = BrokenOracle((), {}, False, ("t.py::test_b",), True, near + far)
    assert confirmed_pool({0: both, 1: both}) == {0: both, 1: both}
    assert {broken.must_fail for broken in confirmed_pool({0: both, 1: one}).values()} == {("t.py::test_b",)}
    only = BrokenOracle((), {}, True, ("t.py::test_a",), True, near)
    assert confirmed_pool({0: only}) == {} == confirmed_pool({0: only, 2: only})
    unnamed = BrokenOracle((), {}, True, (), True, (EditedTest("t.c", "", "value"),))
    assert confirmed_pool({0: unnamed}) == {} and len(confirmed_pool({0: unnamed, 1: unnamed})) == 2
    stored = BrokenOracle((), {}, True, ("t.py::test_a",), True)
    assert confirmed_pool({0: stored}) == {0: stored}, "a row's own pool names no edited tests"


def test_negations_alone_are_weak() -> None:
    kinds = {
        "def test_a():\n    assert not f()\n": True,
        "def test_a():\n    f()\n": True,
        "def test_a():\n    assert f() == 2\n": False,
        "def test_a():\n    assert f() <= 2\n": False,
    }
    for source, is_weak in kinds.items():
        broken = propose({"t.py": source.encode()}, [], 0, False)
        assert broken is not None and broken.is_weak == is_weak, source
    assert not BrokenOracle((), {}, must_fail=("a",)).is_weak, "a row's own pool names no edited tests"


def test_if_values_have_no_effect_negations_are_tried() -> None:
    kinds = set()
    for number in range(12):
        broken = propose({"t.py": b"def test_a():\n    assert f() <= limit()\n    assert g() < 3\n"}, [], number, False)
        assert broken is not None
        kinds.add((number < 8, broken.edited[0].kind))
    assert (True, "refused") in kinds and (True, "negation") not in kinds and (False, "negation") in kinds


def test_what_a_control_run_concludes() -> None:
    broken = BrokenOracle((), {}, must_fail=("a", "b"))
    assert judge_control(broken, run_of({"a": "failed", "b": "passed"})) == ControlResult(["b"], 1)
    assert judge_control(broken, run_of({"a": "failed", "b": "failed"})) == ControlResult([], 2)
    assert judge_control(broken, run_of({"a": "failed"})) == ControlResult([], 1)
    with pytest.raises(SuspectPatchError, match="the tests that must fail"):
        judge_control(broken, run_of({}), suspected=())
    by_exit = BrokenOracle((), {}, exit_fails=True)
    assert judge_control(by_exit, run_of({}, 0)).passed == ["the test command"]
    assert judge_control(by_exit, run_of({}, 3)) == ControlResult([], 1)


def test_a_run_without_a_report_is_no_evidence() -> None:
    by_exit = BrokenOracle((), {}, exit_fails=True)
    lost = TestRun(RunnerReport(1, "", [], lost=True), {}, 1.0, 60.0)
    for silent in (lost, run_of({}, None)):
        with pytest.raises(SuspectPatchError, match="without a report"):
            judge_control(by_exit, silent, suspected=())
        assert not judge_control(by_exit, silent).is_evidence, "in a second box: the patch's doing"
        assert not validated(by_exit, Oracle(exit_code=0), silent).is_valid
    starved = TestRun(RunnerReport(None, "", [], starved=True), {}, 1.0, 60.0)
    with pytest.raises(GraderFailedError, match="without a report"):
        judge_control(by_exit, starved)
    named = BrokenOracle((), {}, must_fail=("a", "b"))
    assert judge_control(named, run_of({"a": "passed"}, None)).passed == ["a"], "it hung too late"


def test_it_survives_the_store() -> None:
    broken = BrokenOracle((Edit("t.py", 0, 1, "x"),), {"t.py": "d"}, False, ("a",), True)
    assert BrokenOracle.of_json(json.loads(json.dumps(broken.as_json()))) == broken
    new = propose({"t.py": TESTS}, [], 0, False)
    assert new is not None and BrokenOracle.of_json(json.loads(json.dumps(new.as_json()))) == new
    stored = {"edits": [{"target": "t.py", "start": 0, "end": 1, "text": "x"}], "digests": {"t.py": "d"}}
    stored |= {"up": False, "must_fail": ["a"], "exit_fails": True}
    assert BrokenOracle.of_json(stored) == broken, "a row's own pool"


def test_the_same_source_is_always_broken_in_the_same_way() -> None:
    source = b"def test_a():\n    for n in numbers:\n        assert f(n) == wanted[n]\n"
    command = b"cat > test_a.py <<END\n" + source + b"END\n"
    for target in ("t.py", "spec:eval_cmd"):
        sources = {target: source if target == "t.py" else command}
        found = [propose(sources, [], 0, False) for _ in range(2)]
        assert found[0] == found[1] and found[0] is not None
        changed = apply_edits(found[0], target, sources[target]).decode()
        compile(changed.partition("<<END\n")[2].rpartition("END\n")[0] or changed, "t.py", "exec")
        assert not set("$`\\") & set(changed), "a shell would expand it"


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
    for number in range(8):
        for wanted in (["t.py::test_b"], []):
            broken = propose({"t.py": TESTS}, wanted, number, not wanted, known={"t.py": old})
            assert broken is not None
            assert b"assert add(1, 1) == 2\n" in apply_edits(broken, "t.py", TESTS)
        named = propose({"t.py": TESTS}, ["t.py::test_b"], number, False)
        assert named is not None and b"assert add(1, 1) == 2\n" in apply_edits(named, "t.py", TESTS)
        wanted_line = propose({"t.py": TESTS}, ["t.py::test_b"], number, False, known={"t.py": TESTS})
        assert wanted_line is not None and b"add(2, 2) == 4" not in apply_edits(wanted_line, "t.py", TESTS)


def test_control_runs_repeat_the_tests_that_some_member_must_fail() -> None:
    outcomes = dict.fromkeys(("t.py::a[1]", "t.py::a[2]", "t.py::b", "t.py::c"), "passed")
    oracle = Oracle(outcomes, canaries=("failed",))
    pool = [BrokenOracle((), {}, must_fail=("t.py::a[1]",)), BrokenOracle((), {}, must_fail=("t.py::b",))]
    selected = selectable_tests(pool, oracle)
    assert set(selected) == {name_digest("t.py::a"), name_digest("t.py::b")}
    assert list(oracle.only(selected).outcomes) == ["t.py::a[1]", "t.py::a[2]", "t.py::b"]
    by_exit = BrokenOracle((), {}, exit_fails=True)
    assert not selectable_tests([*pool, by_exit], oracle), "the exit code is that of all tests"
    assert not selectable_tests(pool, replace(oracle, canaries=())), "no witness ran"
    assert not selectable_tests(pool, oracle.only(selected)), "no test would be left out"
    kept = replace(oracle, selected=selected)
    assert Oracle.of_json(json.loads(json.dumps({**kept.as_json(), "a later key": 1}))) == kept
    runs = KnownRuns(
        kept, dict(enumerate(replace(one, up=not number) for number, one in enumerate(pool)))
    ).control_runs(1)
    assert sorted(runs, key=str) == [0, 1, None, None], "of selected tests a patch sees that they are run again"


def test_of_selected_tests_only_outcomes_are_judged() -> None:
    broken = BrokenOracle((), {}, must_fail=("a",), exit_fails=True)
    assert judge_control(broken, run_of({"a": "failed"}, 0)).passed == ["the test command"]
    found = judge_control(broken, run_of({"a": "failed"}, 0), by_exit=False)
    assert (found.passed, found.failed) == ([], 1)
    assert not judge_control(broken, run_of({}, 5), by_exit=False).is_evidence
