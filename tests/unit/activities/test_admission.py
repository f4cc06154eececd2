"""Pure functions between a box and a reward: verdicts, log parsers, rewards, warnings."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.admission import broken_trial, decide_admission
from activities.datasets.lints import lint_config, lint_rows
from activities.regrade import decisive_grade
from cli.tasks.datasets import _pool_in_words
from grading.assertions.site import Kind
from grading.base import Verdict
from grading.broken_oracles import BrokenOracle, EditedTest
from grading.judge_patch import BrokenTests
from grading.log_parsers import find_log_parser
from grading.rewards import REWARD_FUNCTIONS, RewardFacts, compute_reward
from grading.run_hidden_tests import _parse_report
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, GraderFailedError
from ratchet.grading_payloads import TrialResult
from store.schema import GradeTable
from training.advantage import advantages

FACTS = RewardFacts("done", 3, 100, 10, 1)
COUNTS = st.tuples(st.integers(0, 5), st.integers(1, 5)).map(lambda pair: (min(pair), pair[1]))
VERDICTS = st.builds(
    lambda solved, f2p, p2p: Verdict(solved, "", "", 1.0, fail_to_pass=f2p, pass_to_pass=p2p),
    st.booleans(),
    COUNTS,
    COUNTS,
)


def verdict(
    solved: bool = False, rejected: bool = False, f2p: tuple[int, int] | None = None, p2p: tuple[int, int] | None = None
) -> Verdict:
    return Verdict(solved, "", "", 1.0, rejected, "rule" if rejected else "", fail_to_pass=f2p, pass_to_pass=p2p)


def test_closed_forms() -> None:
    half = verdict(f2p=(1, 2), p2p=(4, 4))
    assert [compute_reward(name, half, FACTS)[0] for name in ("solved", "fraction", "weighted")] == [
        0.0,
        0.5,
        pytest.approx(0.35),
    ]
    broke = verdict(f2p=(2, 2), p2p=(3, 4))
    assert [compute_reward(name, broke, FACTS)[0] for name in ("solved", "fraction", "weighted")] == [
        0.0,
        0.0,
        pytest.approx(0.45),
    ]
    assert [compute_reward(name, verdict(True, f2p=(2, 2), p2p=(4, 4)), FACTS)[0] for name in REWARD_FUNCTIONS] == [
        1.0,
        1.0,
        pytest.approx(1.0),
    ]
    assert compute_reward("fraction", half, FACTS)[1] == {"solved": 0.0, "fail_to_pass": 0.5, "pass_to_pass_kept": 1.0}


def pays_for_cheating(verdict: Verdict, facts: RewardFacts) -> tuple[float, dict[str, float]]:
    """A user's reward function that fails."""
    return (2.0 if verdict.rejected else float(verdict.solved)), {"turns": float(facts.num_turns)}


def not_finite(verdict: Verdict, facts: RewardFacts) -> tuple[float, dict[str, float]]:
    return float("nan"), {}


@given(
    VERDICTS,
    st.lists(st.floats(-1, 1), min_size=2, max_size=6),
    st.sampled_from(["solved", "fraction", "weighted"]),
    st.sampled_from(["mean", "std", "leave_one_out"]),
)
def test_a_rejected_rollout_is_never_better_off_than_one_that_solved_nothing(
    seen: Verdict, others: list[float], function: str, baseline: str
) -> None:
    """For any group, baseline and passed tests: a rejected rollout never gets a higher advantage than a failed one."""
    from dataclasses import replace

    cheat, _ = compute_reward(function, replace(seen, rejected=True, rule="rule"), FACTS)
    honest, _ = compute_reward(function, replace(seen, solved=False, fail_to_pass=(0, 1), pass_to_pass=(0, 1)), FACTS)
    values = advantages([cheat, honest, *others], baseline, "")  # type: ignore[arg-type]
    assert cheat <= honest and values[0] <= values[1] + 1e-9
    assert fmean([cheat, honest, *others]) <= fmean([honest, honest, *others]) + 1e-9


def test_a_function_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "own_rewards", sys.modules[__name__])
    assert compute_reward("own_rewards:pays_for_cheating", verdict(True), FACTS) == (1.0, {"turns": 3.0})
    assert compute_reward("own_rewards:pays_for_cheating", verdict(rejected=True), FACTS)[0] == 0.0
    with pytest.raises(ConfigError, match="must be finite"):
        compute_reward("own_rewards:not_finite", verdict(), FACTS)
    with pytest.raises(ConfigError, match="none of solved, fraction, weighted"):
        compute_reward("solvd", verdict(), FACTS)


def grade(solved: bool, rejected: bool = False) -> GradeTable:
    return GradeTable(solved=solved, rejected=rejected)


def test_the_spread_of_repeated_verdicts() -> None:
    yes, no, cheat = grade(True), grade(False), grade(False, True)
    assert decisive_grade([yes, no, yes]) is yes
    assert decisive_grade([yes, no]) is no, "a draw is not solved"
    assert decisive_grade([yes, yes, cheat]) is cheat


LOGS = {
    "pytest": (
        "PASSED t.py::a\nFAILED t.py::b - assert 1\nPASSED t.py::b\nSKIPPED [1] t.py:3: no\nXFAIL t.py::c - why\n",
        {"t.py::a": "passed", "t.py::b": "failed", "t.py::c": "xfailed"},
    ),
    "django": (
        "test_a (m.C) ... ok\ntest_b (m.C) ... FAIL\ntest_c (m.C) ... skipped 'x'\ntest_d (m.C) ... ok\nERROR:"
        " test_d (m.C)\n",
        {"test_a (m.C)": "passed", "test_b (m.C)": "failed", "test_c (m.C)": "skipped", "test_d (m.C)": "failed"},
    ),
    "sympy": (
        "test_a ok\ntest_b F\ntest_c f\ntest_d ok\n____ sympy/x/test_x.py:test_d ____\n",
        {"test_a": "passed", "test_b": "failed", "test_c": "failed", "test_d": "failed"},
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_printed_logs(name: str) -> None:
    log, expected = LOGS[name]
    assert find_log_parser(name)(log) == expected


def test_a_parser_that_nobody_has() -> None:
    with pytest.raises(GraderFailedError, match="no log parser 'cobol'"):
        find_log_parser("cobol")


def report(end: str, seconds: float = 10.0) -> tuple[int | None, bool, bool]:
    seen = _parse_report(f"n log\nhello\nn frames\nn end {end}\n", "n", frozenset(), seconds, 0)
    return seen.exit_code, seen.starved, seen.lost


def test_a_time_out_is_the_tests_own_unless_they_stood_in_line_for_a_core() -> None:
    assert report("0 0 0 0") == (0, False, False)
    assert report("137 1 9000000000 1000000000") == (None, False, False)
    assert report("137 1 2000000000 6000000000") == (None, True, False)
    assert report("1 0 0 9000000000") == (1, False, False), "slow, but it ended"


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"datasets": [{"path": "x"}], **sections})


def test_lints() -> None:
    assert lint_config(config()) == []
    assert "temperature" in lint_config(config(sampling={"temperature": 0.01}))[0]
    small = {"max_context_tokens": 16000, "max_response_tokens": 1000}
    assert "little is left" in lint_config(config(sampling=small, harness={"name": "claude_code"}))[0]
    assert lint_config(config(sampling=small)) == []
    assert "first prompt" in lint_config(config(sampling=small), longest_statement=40_000)[0]
    row = {"label": "a", "grader": "eval_cmd", "spec": {"eval_cmd": "make test", "gold_patch": None}}
    assert [text.split(";")[0] for text in lint_rows([row, row])] == [
        "2 rows have no gold_patch, so they can never be admitted",
        "2 rows are graded by an exit code alone, which the code under test can fake",
        "2 rows give no verdict until they are admitted, if their command prints no line of a known runner",
        "1 rows have a label that another row has",
    ]


def test_what_teaches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        config(training={"group_size": 1})
    with pytest.raises(ValueError, match="greater than 0"):
        config(sampling={"temperature": 0})


def test_a_broken_trial_needs_its_counterpart() -> None:
    def made(kind: Kind, up: bool) -> BrokenTests:
        edited = (EditedTest("t.py", "test_a", kind),)
        return BrokenTests(BrokenOracle((), {}, up, ("t.py::test_a",), True, edited), 1.0, "1 edits")

    up = made("value", True)
    down = made("value", False)
    assert up.broken is not None
    assert broken_trial(up, {}, 0).solved and broken_trial(down, {0: up.broken}, 1).solved
    alone = broken_trial(down, {}, 1)
    assert not alone.solved and "do not require equality" in alone.reason
    assert broken_trial(made("far", False), {}, 1) == TrialResult(
        patch="broken", solved=True, reason="1 edits", seconds=1.0
    )
    weak = broken_trial(made("negation", False), {}, 1)
    assert weak.solved and "weakly controlled" in weak.reason
    assert _pool_in_words([weak.model_dump(), alone.model_dump()]).startswith("1/2 (1 weak): ")


def _trials(*kinds: str, **changes: object) -> list[TrialResult]:
    """Return trials that went well, the last one with changes."""
    trials = [TrialResult(patch=kind, solved=kind != "empty") for kind in kinds]
    return [*trials[:-1], trials[-1].model_copy(update=changes)]


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (_trials("gold", "empty"), ""),
        (_trials("gold", "empty", "broken", "broken", "control", solved=False), ""),
        (_trials("gold", "empty", "broken", "grade", solved=False, error="the box was lost"), ""),
        (_trials("gold", "empty", "broken", "grade"), ""),
        (_trials("gold", "empty", "grade"), ""),
        (_trials("gold", "empty", "grade", solved=False, error="the box was lost"), "the gold patch got no verdict"),
        (_trials("gold", "empty", "grade", solved=False, left_out=["Makefile"]), "Makefile of the gold patch is left"),
        (_trials("gold", "empty", "broken", "grade", solved=False, reason="exit code 1"), "flaky: exit code 1"),
        (_trials("gold", "empty", "gold", solved=False), "passed 1 of 2 times (flaky"),
        (_trials("gold", "empty", solved=True), "failed 0 of 1 times"),
        (_trials("gold"), "both patches"),
    ],
)
def test_the_decision_on_a_task(trials: list[TrialResult], words: str) -> None:
    """A box that fails in the trial of control runs costs no admission: they repeat all tests then."""
    decided = decide_admission(trials)
    assert decided.admitted == (not words) and words in decided.reason
