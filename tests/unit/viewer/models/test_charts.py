"""Curves lie where their axis says, carry intervals, and leave out what is not stored."""

from datetime import UTC, datetime, timedelta

import pytest

from ratchet.store.views.curve_views import StepReward, StepTimes
from ratchet.store.views.run_views import EvaluationRate
from viewer.models.charts import RunCurves, compare_charts, run_charts

START = datetime(2026, 1, 1, tzinfo=UTC)


def curves(run_id: str = "r") -> RunCurves:
    metrics = {
        0: {"sync_seconds": 9.0},
        1: {"entropy": 0.5, "trained_tokens": 100.0},
        2: {"entropy": 0.4, "trained_tokens": 50.0},
    }
    times = {step: StepTimes(step, "committed", START, START + timedelta(hours=step)) for step in (1, 2)}
    rewards = [StepReward(1, 16, 2, 0.25, 0.1), StepReward(2, 16, 1, 0.5, None)]
    return RunCurves(run_id, START, metrics, times, rewards, [])


@pytest.mark.parametrize(("axis", "xs"), [("steps", [1, 2]), ("tokens", [100, 150]), ("hours", [1, 2])])
def test_positions(axis: str, xs: list[float]) -> None:
    charts = {chart.name: chart for chart in run_charts(curves(), axis)}
    assert charts["reward"].xs == charts["entropy"].xs == xs
    assert charts["entropy"].links == ["/runs/r/steps/1", "/runs/r/steps/2"]


def test_only_stored_metrics_have_a_chart_and_step_0_has_none() -> None:
    assert {chart.name for chart in run_charts(curves(), "steps")} == {"reward", "entropy"}


def test_an_interval_needs_two_groups() -> None:
    (reward,) = (chart.series[0] for chart in run_charts(curves(), "steps") if chart.name == "reward")
    assert reward.values == [0.25, 0.5]
    assert reward.lows[0] is not None and reward.lows[0] < 0.25 and reward.lows[1] is None


def test_runs_are_compared_on_one_axis() -> None:
    entropy = next(chart for chart in compare_charts([curves("a"), curves("b")], "steps") if chart.name == "entropy")
    assert [(one.label, one.values) for one in entropy.series] == [("a", [0.5, 0.4]), ("b", [0.5, 0.4])]


def test_an_evaluation_that_has_not_ended_is_no_point() -> None:
    found = curves()
    ended = EvaluationRate("start-t1", 0, 1.0, "r/0.e0", 99, 198, 0.3, 0.4, START, START)
    running = EvaluationRate("end-t1", 2, 1.0, "r/2.e0", 0, 0, None, None, START, None)
    with_both = RunCurves(found.run_id, START, found.metrics, found.times, found.rewards, [ended, running])
    evaluation = next(chart for chart in run_charts(with_both, "steps") if chart.name == "evaluation")
    assert evaluation.xs == [0.0] and evaluation.series[0].values == [0.3]
