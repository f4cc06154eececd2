"""The words for control runs: equal ones are told once, with their number."""

from reads.reward_explanation import control_words


def test_control_runs_that_are_alike_are_told_once() -> None:
    failed = {"broken_oracle": 2, "passed": [], "failed": 2}
    found = control_words([failed, {"broken_oracle": 3, "passed": ["a"], "failed": 1}, failed, *2 * [{"solved": True}]])
    assert found == [
        "in a control run 2 tests failed as they must (2 times)",
        "in a control run 1 tests passed that must fail",
        "a second run with the true tests confirmed it (2 times)",
    ]
