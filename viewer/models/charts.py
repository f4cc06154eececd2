"""Curves of runs: which metrics make which chart, over steps, trained tokens or hours, with 95% intervals of means."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import sqrt
from urllib.parse import quote

from reads.curves import Metrics, StepReward, StepTimes
from reads.evaluations import EvaluationRate
from reads.vitals import TRAINING_REWARD

AXES = {"steps": "step", "tokens": "trained tokens", "hours": "hours since the run began"}


_T_QUANTILES = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
    2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom."""
_NORMAL_QUANTILE = 1.96


def mean_interval(mean: float, deviation: float | None, number: int) -> tuple[float, float] | None:
    """Return the interval of a mean over `number` units with this sample standard deviation, None without a spread.

    Rollouts of one group share a task, so the units must be groups or tasks, not rollouts.
    """
    if deviation is None or number < 2:
        return None
    quantile = _T_QUANTILES[number - 2] if number - 2 < len(_T_QUANTILES) else _NORMAL_QUANTILE
    half = quantile * deviation / sqrt(number)
    return mean - half, mean + half


@dataclass(slots=True, frozen=True)
class ChartSeries:
    """One line. `lows` and `highs`: the bounds of its interval, empty without one. `band`: no line, points only."""

    label: str
    values: list[float | None]
    lows: list[float | None]
    highs: list[float | None]


@dataclass(slots=True, frozen=True)
class Chart:
    """A chart. `links[i]`: the page behind the i-th point. `note`: what the values and their interval are."""

    name: str
    title: str
    note: str
    x_label: str
    xs: list[float]
    series: list[ChartSeries]
    links: list[str]


@dataclass(slots=True, frozen=True)
class RunCurves:
    """The data of one run's charts. `tokens_before`: tokens trained by the steps before the first step of `metrics`;
    read only for the axis of tokens."""

    run_id: str
    created_at: datetime
    metrics: Mapping[int, Metrics]
    times: Mapping[int, StepTimes]
    rewards: Sequence[StepReward]
    evaluations: Sequence[EvaluationRate]
    tokens_before: float = 0.0


_METRIC_CHARTS = (
    ("entropy", "Entropy", "Mean over trained tokens, in nats.", {"entropy": "entropy"}),
    (
        "mismatch",
        "Mismatch between sampler and learner",
        "KL of the recorded logprobs against the learner's; the mean gap on tokens of the weights that are trained.",
        {"mismatch_kl": "KL", "engine_noise_abs": "mean gap"},
    ),
    ("ratios", "Effective sample size of ratios", "As a share of the tokens; 1 is on policy.", {"ratio_ess": "share"}),
    (
        "masked",
        "Tokens without gradient",
        "Share of the trained tokens whose ratios are out of bounds, and the parts below and above.",
        {"masked_fraction": "without gradient", "masked_low_fraction": "below", "masked_high_fraction": "above"},
    ),
    (
        "staleness",
        "Staleness",
        "Steps between the weights that sampled and those trained.",
        {"staleness_mean": "mean", "staleness_max": "largest"},
    ),
    ("loss", "Loss and gradient norm", "", {"loss": "loss", "grad_norm": "gradient norm"}),
    (
        "speed",
        "Tokens per second",
        "Of the learner, over its passes and updates.",
        {"chain_tokens_per_second": "tokens of chains", "computed_tokens_per_second": "tokens computed"},
    ),
    (
        "time",
        "Where a step's time goes",
        "Seconds: waiting for a batch, loading it, training, publishing weights, updating engines.",
        {
            "wait_for_batch_seconds": "wait", "load_seconds": "load", "step_seconds": "train",
            "publish_seconds": "publish", "sync_seconds": "update engines",
        },
    ),
    (
        "groups",
        "Groups with signal",
        "Share of the consumed groups whose rewards differ, and shares that are all solved or all unsolved.",
        {
            "groups_with_signal_fraction": "with signal", "groups_solved_all_fraction": "all solved",
            "groups_solved_none_fraction": "none solved",
        },
    ),
)  # fmt: skip


def run_charts(curves: RunCurves, axis: str) -> list[Chart]:
    """Return the charts of one run; a chart without a stored value is left out."""
    charts = [reward_chart([curves], axis), evaluation_chart(curves)]
    return [chart for chart in [*charts, *_metric_charts([curves], axis)] if chart.xs]


def reward_chart(runs: Sequence[RunCurves], axis: str) -> Chart:
    """Return the mean reward by step; one series per run, on a common axis."""
    points: dict[float, dict[str, StepReward]] = {}
    links: dict[float, str] = {}
    for run in runs:
        position = step_positions(run, axis)
        for reward in run.rewards:
            if reward.step in position:
                points.setdefault(position[reward.step], {})[run.run_id] = reward
                links.setdefault(position[reward.step], f"/runs/{quote(run.run_id)}/steps/{reward.step}")
    xs = sorted(points)
    series = []
    for run in runs:
        rewards = [points[x].get(run.run_id) for x in xs]
        series.append(_with_intervals(run.run_id if len(runs) > 1 else TRAINING_REWARD, rewards))
    note = "Mean over all groups but forks that a step consumed, with a 95% interval over groups; the newest 100 steps."
    return Chart("reward", TRAINING_REWARD.capitalize(), note, AXES[axis], xs, series, [links[x] for x in xs])


def evaluation_chart(curves: RunCurves) -> Chart:
    """Return the held-out mean reward by step, one series per temperature and number of samples.

    Evaluations that still run are left out. If one was repeated at a step, the newest counts.
    """
    ended = [one for one in curves.evaluations if one.ended_at is not None and one.mean is not None]
    ended.sort(key=lambda one: one.created_at)
    xs = sorted({float(one.step) for one in ended})
    series = []
    for temperature, samples in sorted({(one.temperature, one.num_samples) for one in ended}):
        found = {float(one.step): one for one in ended if (one.temperature, one.num_samples) == (temperature, samples)}
        label = f"T = {temperature:g}, {samples} {'sample' if samples == 1 else 'samples'} a task"
        series.append(_with_intervals(label, [found.get(x) for x in xs]))
    links = [f"/rollouts?run={quote(curves.run_id)}&purpose=eval&step={x:.0f}" for x in xs]
    note = "Held-out tasks, mean over the tasks with a verdict, with a 95% interval over tasks; ended evaluations only."
    return Chart("evaluation", "Mean reward in evaluations", note, "step", xs, series, links)


def _with_intervals(label: str, points: Sequence[StepReward | EvaluationRate | None]) -> ChartSeries:
    """Return the means with intervals between 0 and 1; or to a reward beyond them that was given."""
    bounds: list[tuple[float, float] | None] = []
    for one in points:
        bounds.append(None)
        if one is not None:
            number = one.num_groups if isinstance(one, StepReward) else one.num_rated_tasks
            if (found := mean_interval(one.mean or 0.0, one.deviation, number)) is not None:
                bounds[-1] = max(found[0], min(0.0, one.lowest)), min(found[1], max(1.0, one.highest))
    lows, highs = ([one and one[end] for one in bounds] for end in (0, 1))
    return ChartSeries(label, [one.mean if one else None for one in points], lows, highs)


def compare_charts(runs: Sequence[RunCurves], axis: str) -> list[Chart]:
    """Return one chart per metric of `_METRIC_CHARTS`, with a series per run."""
    return [chart for chart in [reward_chart(runs, axis), *_metric_charts(runs, axis)] if chart.xs]


def _metric_charts(runs: Sequence[RunCurves], axis: str) -> Iterator[Chart]:
    """Yield the charts of `_METRIC_CHARTS`: of one run with a series per metric, of several with the first metric."""
    is_one = len(runs) == 1
    placed = [(run, step_positions(run, axis), f"/runs/{quote(run.run_id)}/steps/") for run in runs]
    for name, title, note, metrics in _METRIC_CHARTS:
        first = next(iter(metrics))
        points: dict[float, dict[str, float]] = {}
        links: dict[float, str] = {}
        for run, position, page in placed:
            wanted = metrics if is_one else {first: run.run_id}
            for step, values in run.metrics.items():
                # Step 0 has metrics of the engines' first update, and no plan row.
                if step > 0 and step in position and not wanted.keys().isdisjoint(values):
                    found = {label: values[metric] for metric, label in wanted.items() if metric in values}
                    points.setdefault(position[step], {}).update(found)
                    links[position[step]] = f"{page}{step}"
        xs = sorted(points)
        stored = {label for found in points.values() for label in found}
        labels = [one for one in metrics.values() if one in stored] if is_one else [run.run_id for run in runs]
        series = [ChartSeries(one, [points[x].get(one) for x in xs], [], []) for one in labels]
        shown = title if is_one else f"{title}: {metrics[first]}"
        yield Chart(name, shown, note, AXES[axis], xs, series, [links[x] for x in xs])


def step_positions(curves: RunCurves, axis: str) -> dict[int, float]:
    steps = sorted(set(curves.metrics) | {one.step for one in curves.rewards})
    if axis == "tokens":
        total = curves.tokens_before
        found = {}
        for step in steps:
            total += curves.metrics.get(step, {}).get("trained_tokens", 0.0)
            found[step] = total
        return found
    if axis == "hours":
        ends = {step: one.stepped_at for step, one in curves.times.items() if one.stepped_at is not None}
        return {
            step: round((ends[step] - curves.created_at).total_seconds() / 3600, 4) for step in steps if step in ends
        }
    return {step: float(step) for step in steps}
