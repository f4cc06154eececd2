"""A run without a test is a gap."""

from grading.evidence import find_gap
from grading.run_hidden_tests import RunnerReport, RunnerSession


def _report(exit_code: int | None, log: str = "", *sessions: RunnerSession) -> RunnerReport:
    return RunnerReport(exit_code, log, list(sessions))


def test_evidence_of_a_command() -> None:
    for exit_code in (0, 1):
        assert not find_gap(_report(exit_code), ())
        assert find_gap(_report(exit_code, "Ran 0 tests in 0.0s\n"), ())
        assert "uvx" in find_gap(_report(exit_code, "bash: uvx: command not found\n"), ())
        assert not find_gap(_report(exit_code, "bash: x: command not found\nRan 2 tests in 0.0s\n"), ())
    assert "exit code 127" in find_gap(_report(127), ())
    assert not find_gap(_report(None, "Ran 0 tests in 0.0s\n"), ()), "a time-out is judged as one"


def test_evidence_by_name() -> None:
    for outcomes in ((), ("skipped",), ("missing", "skipped")):
        assert find_gap(_report(0), outcomes, by_name=True)
    assert not find_gap(_report(0), ("missing", "failed"), by_name=True)
    assert not find_gap(_report(137), (), by_name=True), "a signal is judged as one"


def test_evidence_of_the_witness() -> None:
    assert "never started" in find_gap(_report(0, "1 passed in 0.1s"), ("passed",), by_witness=True)
    none = RunnerSession("token", 1, exit=5)
    assert "no test" in find_gap(_report(5, "", none), (), by_witness=True)
    stopped = RunnerSession("token", 1)
    changed = RunnerSession("token", 1, exit=0)
    for session in (stopped, changed):
        assert not find_gap(_report(0, "", session), (), by_witness=True), "it was ended from inside"
