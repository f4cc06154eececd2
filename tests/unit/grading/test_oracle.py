"""The oracle: what gold runs have in common, and what differs from it."""

import json
from dataclasses import replace

from grading.evidence import all_tests, judge_runner, judge_sessions, lacks_canary, worst_outcomes
from grading.oracle import Oracle, merge_oracles, name_digest
from grading.printed_results import MAX_CHARACTERS
from grading.run_hidden_tests import LoadedModule, RunnerReport, RunnerSession


def session(
    tests: dict[str, str], canary: str = "failed", code: str = "code", num_missed: int = 0, changed: bool = False
) -> RunnerSession:
    found = RunnerSession("token", 1, exit=0, canary=canary, tests=tests)
    found.modules = {"t.py": LoadedModule("t.py", frozenset(name_digest(name) + code for name in tests), changed)}
    found.num_missed = num_missed
    return found


def report(*sessions: RunnerSession) -> RunnerReport:
    return RunnerReport(0, "", list(sessions))


GOLD = report(session({"t.py::a": "passed", "t.py::b": "xfailed", "t.py::c": "passed"}))
ORACLE = Oracle.of_run(GOLD, GOLD.sessions[0].tests)


def test_a_run_like_the_gold_runs() -> None:
    assert judge_sessions(GOLD, True, (), ORACLE).ok
    assert Oracle.of_json(json.loads(json.dumps(ORACLE.as_json()))) == ORACLE


def test_what_differs_is_not_solved() -> None:
    tests = GOLD.sessions[0].tests
    for different in (
        report(),
        report(session({**tests, "t.py::a": "xfailed"})),
        report(session({**tests, "t.py::a": "skipped"})),
        report(session({"t.py::c": "passed"})),
        report(session(tests, canary="none")),
        report(session(tests, canary="passed")),
        report(session(tests, code="other")),
        report(session(tests, changed=True)),
        report(session(tests, num_missed=1)),
        report(session(tests), session(tests)),
        report(session(tests), RunnerSession("token", 2, worker=True, exit=0, canary="passed")),
    ):
        assert not judge_sessions(different, True, (), ORACLE).ok, different
    elsewhere = session(tests)
    elsewhere.modules["t.py"] = LoadedModule("t/__init__.py", frozenset())
    assert not judge_runner(report(elsewhere)).ok


def test_more_sessions_are_a_difference_only_without_control_runs() -> None:
    tests = GOLD.sessions[0].tests
    controlled = replace(ORACLE, may_run_more=True)
    assert judge_sessions(report(session(tests), session(tests)), True, (), controlled).ok
    for wrong in (
        report(session({**tests, "t.py::a": "failed"}), session(tests)),
        report(session({**tests, "t.py::a": "skipped"}), session(tests)),
        report(session(tests), session(tests, canary="passed")),
    ):
        assert not judge_sessions(wrong, True, (), controlled).ok, wrong
    twice = Oracle.of_run(report(session(tests), session(tests)), tests)
    assert not judge_sessions(GOLD, True, (), replace(twice, may_run_more=True)).ok, "fewer sessions"


def test_an_added_session_covers_no_failure_of_listed_tests() -> None:
    failed = session({"t.py::a": "failed"})
    faked = session({"t.py::a": "passed"})
    for run in (report(failed, faked), report(faked, failed)):
        outcomes = all_tests(run)
        one = Oracle(num_sessions=1, may_run_more=True)
        assert worst_outcomes(outcomes, run, one) == {"t.py::a": "failed"}
        assert worst_outcomes({"a": "passed"}, run, one)["a"] == "failed", "a parser's name"
        assert worst_outcomes(outcomes, run, Oracle(num_sessions=2)) == outcomes == all_tests(run)


def test_more_tests_and_more_parameters_are_no_difference() -> None:
    tests = {"t.py::a[1]": "passed", "t.py::a[2]": "passed"}
    oracle = Oracle.of_run(report(session(tests)), tests)
    for more in ("t.py::a[3]", "t.py::b"):
        assert judge_sessions(report(session({**tests, more: "passed"})), True, (), oracle).ok, more


def test_a_test_that_only_the_gold_run_has_is_judged_by_its_outcome() -> None:
    tests = {"t.py::a": "passed", "t.py::b": "skipped"}
    oracle = Oracle.of_run(report(session(tests)), tests)
    assert judge_sessions(report(session({"t.py::a": "passed"})), True, (), oracle).ok
    without_report = session({"t.py::a": "passed"})
    without_report.modules = {}
    assert not judge_sessions(report(without_report), True, (), oracle).ok


def test_without_an_oracle_the_canary_must_have_run() -> None:
    assert judge_runner(report(session({"t.py::a": "passed"}))).ok
    assert not judge_runner(report(session({"t.py::a": "passed"}, canary="none"))).ok
    unsupported = report(session({"t.py::a": "passed"}, canary="unsupported"))
    assert judge_runner(unsupported).ok and lacks_canary(unsupported, None), (
        "no proof of a changed runner, and none of success"
    )
    assert judge_runner(unsupported, ORACLE).ok and lacks_canary(unsupported, ORACLE), "the gold runs' canaries ran"
    assert not lacks_canary(unsupported, Oracle(canaries=("unsupported",)))
    workers = [RunnerSession("token", number, worker=True, exit=0, canary="failed") for number in (2, 3)]
    assert judge_runner(report(session({"t.py::a": "passed"}, canary="none"), *workers)).ok


def test_a_session_whose_tests_cannot_be_imported_needs_no_canary() -> None:
    for oracle in (None, ORACLE):
        judged = judge_sessions(report(session({"t.py": "failed"}, canary="none")), True, (), oracle)
        assert not judged.ok and not judged.rule, judged
        assert judge_sessions(
            report(session({"t.py": "failed", "t.py::a": "passed"}, canary="none")), True, (), oracle
        ).rule


def test_what_varies_between_gold_runs_is_left_out() -> None:
    other = report(session({"t.py::a": "passed", "t.py::b": "failed"}), session({"t.py::d": "passed"}))
    merged = merge_oracles([ORACLE, Oracle.of_run(other, other.sessions[0].tests)])
    assert merged.modules == {"t.py": []}
    assert merged.outcomes == {"t.py::a": "passed"} and merged.num_sessions is None and merged.exit_code == 0


def test_a_run_that_used_far_more_time_than_gold_was_not_starved() -> None:
    """A patch that spins on a busy machine gets little of a core, and yet more than the tests need."""
    runs = [Oracle(cpu_seconds=seconds) for seconds in (None, 3.0, 4.0)]
    gold = merge_oracles(runs)
    assert gold.cpu_seconds == 4.0 and Oracle.of_json(json.loads(json.dumps(gold.as_json()))) == gold
    assert [gold.is_exceeded_by(seconds, 60.0) for seconds in (2.0, 19.0, 21.0)] == [False, False, True]
    assert not Oracle(cpu_seconds=0.1).is_exceeded_by(9.0, 60.0), "a machine may be slow"
    assert not Oracle(cpu_seconds=2.0).is_exceeded_by(11.0, 600.0), "it might have ended within the other 589 s"
    assert Oracle(cpu_seconds=2.0).is_exceeded_by(200.0, 600.0)
    assert not merge_oracles(runs[:1]).is_exceeded_by(1e6, 60.0), "not measured by an earlier version"


def printed(log: str, exit_code: int = 0) -> RunnerReport:
    return RunnerReport(exit_code, log, [])


def test_a_command_that_succeeds_ends_as_the_gold_runs_did() -> None:
    gold = merge_oracles([Oracle.of_run(printed(f"line\n3 tests passed in {time} ms\n\n"), {}) for time in (5, 12)])
    assert gold.early_end(printed("4 tests passed in 7 ms\nBye")) == []
    assert [flag.what for flag in gold.early_end(printed("line"))] == ["ends before its tests"]
    assert gold.early_end(printed("line", exit_code=1)) == [], "it claims nothing"
    assert gold.early_end(report(session({"t.py::test_a": "passed"}))) == [], "its witness tells"
    assert merge_oracles([gold, Oracle.of_run(printed("another end"), {})]).early_end(printed("line")) == []
    assert Oracle.of_run(printed(" \n"), {}).early_end(printed("")) == [] == Oracle().early_end(printed(""))


def test_other_tests_after_an_early_end_do_not_hide_it() -> None:
    logs = [f"{number} checks passed\n3 checks passed\n" for number in (4, 5)]
    gold = merge_oracles([Oracle.of_run(printed(log), {}) for log in (*logs, logs[0] + "2 checks passed\n")])
    assert gold.num_results == 2 and Oracle.of_json(json.loads(json.dumps(gold.as_json()))) == gold
    assert gold.early_end(printed(logs[1])) == [] == gold.early_end(printed("3 checks passed\n", exit_code=1))
    assert [flag.what for flag in gold.early_end(printed("3 checks passed\n"))] == ["ends before its tests"]
    long = Oracle.of_run(printed("x" * MAX_CHARACTERS + logs[0]), {})
    assert long.num_results == 0, "of a long log a part is read"
    assert Oracle.of_run(report(session({"t.py::test_a": "passed"})), {}).num_results == 0
