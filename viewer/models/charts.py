"""Charts of runs: metrics over steps, trained tokens or hours, with 95% intervals of means; and bins of rewards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import sqrt
from urllib.parse import quote

from reads.curves import Metrics, StepReward, StepTimes
from reads.evaluations import EvaluationRate
from reads.vitals import TRAINING_REWARD

AXES = {"steps": "step", "tokens": "trained tokens", "hours": "hours since the run began"}
_NUM_BINS = 10
_MAX_DISTINCT = 12


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
    ("mismatch", "Mismatch between sampler and learner",
     "KL of the recorded logprobs against the learner's; the mean gap on tokens of the weights that are trained.",
     {"mismatch_kl": "KL", "engine_noise_abs": "mean gap"}),
    ("ratios", "Effective sample size of ratios", "As a share of the tokens; 1 is on policy.", {"ratio_ess": "share"}),
    ("masked", "Tokens without gradient",
     "Share of the trained tokens whose ratios are out of bounds, and the parts below and above.",
     {"masked_fraction": "without gradient", "masked_low_fraction": "below", "masked_high_fraction": "above"}),
    ("staleness", "Staleness", "Steps between the weights that sampled and those trained.",
     {"staleness_mean": "mean", "staleness_max": "largest"}),
    ("loss", "Loss and gradient norm", "", {"loss": "loss", "grad_norm": "gradient norm"}),
    ("speed", "Tokens per second", "Of the learner, over its passes and updates.",
     {"chain_tokens_per_second": "tokens of chains", "computed_tokens_per_second": "tokens computed"}),
    ("time", "Where a step's time goes",
     "Seconds: waiting for a batch, loading it, training, publishing weights, updating engines.",
     {"wait_for_batch_seconds": "wait", "load_seconds": "load", "step_seconds": "train",
      "publish_seconds": "publish", "sync_seconds": "update engines"}),
    ("groups", "Groups with signal",
     "Share of the consumed groups whose rewards differ, and shares that are all solved or all unsolved.",
     {"groups_with_signal_fraction": "with signal", "groups_solved_all_fraction": "all solved",
      "groups_solved_none_fraction": "none solved"}),
)  # fmt: skip


def reward_chart(runs: Sequence[RunCurves], axis: str) -> Chart:
    """Return the mean reward by step; one series per run, on a common axis."""
    points: dict[str, dict[float, StepReward]] = {}
    links: dict[float, str] = {}
    for run in runs:
        position = step_positions(run, axis)
        of_run = points.setdefault(run.run_id if len(runs) > 1 else TRAINING_REWARD, {})
        for reward in run.rewards:
            if reward.step in position:
                of_run[position[reward.step]] = reward
                links.setdefault(position[reward.step], f"/runs/{quote(run.run_id)}/steps/{reward.step}")
    note = "Mean over all groups but forks that a step consumed, with a 95% interval over groups; the newest 100 steps."
    xs = sorted(links)
    series = [_with_intervals(label, [found.get(x) for x in xs]) for label, found in points.items()]
    return Chart("reward", TRAINING_REWARD.capitalize(), note, AXES[axis], xs, series, [links[x] for x in xs])


def evaluation_chart(runs: Sequence[RunCurves], axis: str) -> Chart:
    """Return the held-out mean reward, one series per run, temperature and number of samples.

    Evaluations that still run are left out. If one was repeated at a step, the newest counts.
    """
    points: dict[str, dict[float, EvaluationRate]] = {}
    links: dict[float, str] = {}
    for run in runs:
        position = step_positions(run, axis)
        of_run = f"{run.run_id}, " if len(runs) > 1 else ""
        for one in sorted(run.evaluations, key=lambda one: (one.temperature, one.num_samples, one.created_at)):
            if one.step in position and one.ended_at is not None and one.mean is not None:
                label = f"T = {one.temperature:g}, {one.num_samples} sample{'s' * (one.num_samples > 1)} a task"
                points.setdefault(of_run + label, {})[position[one.step]] = one
                page = f"/rollouts?run={quote(run.run_id)}&purpose=eval&step={one.step}"
                links.setdefault(position[one.step], page)
    note = "Held-out tasks, mean over the tasks with a verdict, with a 95% interval over tasks; ended evaluations only."
    xs = sorted(links)
    series = [_with_intervals(label, [found.get(x) for x in xs]) for label, found in points.items()]
    return Chart("evaluation", "Mean reward in evaluations", note, AXES[axis], xs, series, [links[x] for x in xs])


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


def draw_charts(runs: Sequence[RunCurves], axis: str) -> list[Chart]:
    """Return the charts of one run, or of several with a series per run; a chart without a stored value is left out."""
    charts = [reward_chart(runs, axis), evaluation_chart(runs, axis), *_metric_charts(runs, axis)]
    return [chart for chart in charts if chart.xs]


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
    """Return the places of the steps that have metrics, rewards or an evaluation, as far as the axis has one."""
    evaluated = {one.step: one.created_at for one in curves.evaluations}
    steps = sorted(set(curves.metrics) | {one.step for one in curves.rewards} | set(evaluated))
    if axis == "tokens":
        total, found = curves.tokens_before, {}
        first = min(curves.metrics, default=0) if curves.tokens_before else 0
        for step in steps:
            total += curves.metrics.get(step, {}).get("trained_tokens", 0.0)
            if step >= first:
                found[step] = total
        return found
    if axis == "hours":
        trained = {step: one.stepped_at for step, one in curves.times.items() if one.stepped_at is not None}
        ends = evaluated | trained
        return {
            step: round((ends[step] - curves.created_at).total_seconds() / 3600, 4) for step in steps if step in ends
        }
    return {step: float(step) for step in steps}


@dataclass(slots=True, frozen=True)
class RewardBin:
    """Rewards from `low` to `high`, both inclusive. `share`: of the fullest bin."""

    low: float
    high: float
    number: int
    share: float
    link: str


def reward_bins(run_id: str, counts: Mapping[float, int]) -> list[RewardBin]:
    """Return one bin per reward if there are few different ones, else ten bins of equal width.

    `counts`: reward → number, the lowest first."""
    if not counts:
        return []
    if len(counts) <= _MAX_DISTINCT:
        ranges = [(reward, reward, number) for reward, number in counts.items()]
    else:
        lowest, width = min(counts), (max(counts) - min(counts)) / _NUM_BINS
        members: list[list[float]] = [[] for _ in range(_NUM_BINS)]
        for reward in counts:
            members[min(_NUM_BINS - 1, int((reward - lowest) / width))].append(reward)
        ranges = [(part[0], part[-1], sum(counts[one] for one in part)) for part in members if part]
    fullest = max(number for _, _, number in ranges)
    page = f"/rollouts?run={quote(run_id)}&purpose=train"
    return [
        RewardBin(low, high, number, number / fullest, f"{page}&reward_from={low!r}&reward_to={high!r}")
        for low, high, number in ranges
    ]
