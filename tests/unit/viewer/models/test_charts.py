"""Curves lie where their axis says, carry intervals, and leave out what is not stored; bins hold every rollout once."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reads.curves import StepReward, StepTimes
from reads.evaluations import EvaluationRate
from viewer.models.charts import Chart, RunCurves, draw_charts, reward_bins

START = datetime(2026, 1, 1, tzinfo=UTC)
REWARD_COUNTS = st.dictionaries(st.floats(-10, 10), st.integers(1, 1000), max_size=40)


def curves(run_id: str = "r") -> RunCurves:
    metrics = {
        0: {"sync_seconds": 9.0},
        1: {"entropy": 0.5, "trained_tokens": 100.0},
        2: {"entropy": 0.4, "trained_tokens": 50.0},
    }
    times = {step: StepTimes(step, "committed", START, START + timedelta(hours=step), 0) for step in (1, 2)}
    rewards = [StepReward(1, 16, 2, 0.25, 0.1), StepReward(2, 16, 1, 0.5, None)]
    return RunCurves(run_id, START, metrics, times, rewards, [])


@pytest.mark.parametrize(("axis", "xs"), [("steps", [1, 2]), ("tokens", [100, 150]), ("hours", [1, 2])])
def test_positions(axis: str, xs: list[float]) -> None:
    charts = {chart.name: chart for chart in draw_charts([curves()], axis)}
    assert charts["reward"].xs == charts["entropy"].xs == xs
    assert charts["entropy"].links == ["/runs/r/steps/1", "/runs/r/steps/2"]


def test_tokens_of_steps_before_the_charted_ones_count() -> None:
    charts = {chart.name: chart for chart in draw_charts([replace(curves(), tokens_before=1000.0)], "tokens")}
    assert charts["reward"].xs == charts["entropy"].xs == [1100, 1150]


def test_only_stored_metrics_have_a_chart_and_step_0_has_none() -> None:
    assert {chart.name for chart in draw_charts([curves()], "steps")} == {"reward", "entropy"}


def test_an_interval_needs_two_groups() -> None:
    (reward,) = (chart.series[0] for chart in draw_charts([curves()], "steps") if chart.name == "reward")
    assert reward.values == [0.25, 0.5]
    assert reward.lows[0] is not None and reward.lows[0] < 0.25 and reward.lows[1] is None


def test_runs_are_compared_on_one_axis() -> None:
    entropy = next(chart for chart in draw_charts([curves("a"), curves("b")], "steps") if chart.name == "entropy")
    assert [(one.label, one.values) for one in entropy.series] == [("a", [0.5, 0.4]), ("b", [0.5, 0.4])]


def evaluation(label: str, step: int, mean: float | None, created: int = 0, **values: Any) -> EvaluationRate:
    fixed = {"temperature": 1.0, "num_samples": 2, "num_rated_tasks": 99, "deviation": 0.4, "ended_at": START, **values}
    moment = START + timedelta(hours=created)
    return EvaluationRate(
        label=label, step=step, mean=mean, policy_version="r/0.e0", num_tasks=100, num_rollouts=200, num_graded=198,
        created_at=moment, **fixed,
    )  # fmt: skip


def test_tokens_without_gradient_have_an_axis_of_their_own() -> None:
    """Beside a sample size of nearly 1, shares of a thousandth cannot be seen."""
    stored = {1: {"ratio_ess": 0.99, "masked_fraction": 0.001, "masked_high_fraction": 0.001}}
    charts = {one.name: one for one in draw_charts([replace(curves(), metrics=stored)], "steps")}
    assert [one.label for one in charts["ratios"].series] == ["share"]
    assert [one.label for one in charts["masked"].series] == ["without gradient", "above"]


def evaluation_chart_of(*evaluations: EvaluationRate) -> Chart:
    with_them = replace(curves(), evaluations=evaluations)
    return next(chart for chart in draw_charts([with_them], "steps") if chart.name == "evaluation")


def test_an_evaluation_that_has_not_ended_is_no_point() -> None:
    running = evaluation("end-t1", 2, 0.9, ended_at=None)
    chart = evaluation_chart_of(evaluation("start-t1", 0, 0.3), evaluation("lost", 1, None), running)
    assert chart.xs == [0.0] and chart.series[0].values == [0.3]


def test_the_newest_evaluation_of_a_step_counts() -> None:
    chart = evaluation_chart_of(evaluation("asked2", 1, 0.6, created=2), evaluation("asked1", 1, 0.4, created=1))
    assert [one.values for one in chart.series] == [[0.6]]


def test_evaluations_of_several_runs_lie_on_each_axis() -> None:
    """That of step 0 is where nothing was trained yet; in hours it is where it began."""
    runs = [
        replace(curves(name), evaluations=[evaluation("start", 0, 0.3), evaluation("end", 2, mean, created=2)])
        for name, mean in (("a", 0.5), ("b", 0.7))
    ]
    for axis, xs in (("steps", [0, 2]), ("tokens", [0, 150]), ("hours", [0, 2])):
        chart = next(one for one in draw_charts(runs, axis) if one.name == "evaluation")
        assert chart.xs == xs, axis
        labels = {one.label: one.values for one in chart.series}
        assert labels == {"a, T = 1, 2 samples a task": [0.3, 0.5], "b, T = 1, 2 samples a task": [0.3, 0.7]}
    cut = replace(runs[0], metrics={2: {"trained_tokens": 50.0}}, tokens_before=100.0, rewards=[])
    chart = next(one for one in draw_charts([cut], "tokens") if one.name == "evaluation")
    assert chart.xs == [150], "how many tokens were trained before an earlier step is not known"


def test_numbers_of_samples_are_not_mixed() -> None:
    chart = evaluation_chart_of(
        evaluation("start", 0, 0.3), evaluation("many", 1, 0.5, num_samples=8), evaluation("end", 2, 0.4)
    )
    labels = {one.label: one.values for one in chart.series}
    assert labels == {"T = 1, 2 samples a task": [0.3, None, 0.4], "T = 1, 8 samples a task": [None, 0.5, None]}


def test_the_interval_is_over_the_tasks_with_a_verdict() -> None:
    (series,) = evaluation_chart_of(evaluation("start", 0, 0.5, num_rated_tasks=1)).series
    assert series.values == [0.5] and series.lows == [None]


def test_an_interval_does_not_leave_the_rewards_that_there_can_be() -> None:
    wide = replace(curves(), rewards=[StepReward(1, 16, 2, 0.9, 0.2), StepReward(2, 16, 2, 0.9, 0.2, -2.0, 3.0)])
    (reward,) = (chart.series[0] for chart in draw_charts([wide], "steps") if chart.name == "reward")
    assert reward.highs[0] == 1 and reward.lows[0] == 0
    assert reward.highs[1] is not None and reward.highs[1] > 1 and reward.lows[1] is not None and reward.lows[1] < 0
    (series,) = evaluation_chart_of(evaluation("end", 2, 0.99, num_rated_tasks=5)).series
    assert series.highs == [1]


@given(REWARD_COUNTS)
def test_every_rollout_is_in_one_bin_whose_link_selects_it(counts: dict[float, int]) -> None:
    bins = reward_bins("r", dict(sorted(counts.items())))
    assert sum(one.number for one in bins) == sum(counts.values())
    for one in bins:
        query = parse_qs(urlsplit(one.link).query)
        low, high = float(query["reward_from"][0]), float(query["reward_to"][0])
        assert sum(number for reward, number in counts.items() if low <= reward <= high) == one.number
    assert not bins or max(one.share for one in bins) == 1
