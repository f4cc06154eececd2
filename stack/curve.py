"""Summarise a run's evaluations: solve rates with intervals, paired differences, rates per bug family, and the plot.

Printed, committed and tested figures all come from this module. Intervals are bootstrap percentiles over tasks, not
over rollouts (`ratchet/solve_rates.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ratchet.solve_rates import interval

Rates = dict[str, float]
"""Task digest → mean reward."""
_PLACES = {
    "start-t1": "sampled\nbefore",
    "end-t1": "sampled\nafter",
    "start-greedy": "greedy\nbefore",
    "end-greedy": "greedy\nafter",
}
"""Label of an evaluation → its name in the plot, from the left."""


def rates_by_task(
    rows: Sequence[dict[str, Any]], label: str, family: str | None = None, dataset: str | None = None
) -> Rates:
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row["label"] == label and family in (None, row["family"]) and dataset in (None, row["dataset"]):
            rewards.setdefault(row["task"], []).append(row["reward"])
    return {task: float(np.mean(values)) for task, values in rewards.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise: per evaluation the rate and interval; per kind (sampled, greedy) the difference after - before, paired
    by task; per family the rate before and after; of several datasets, both of each."""
    labels = sorted({row["label"] for row in rows})
    datasets = sorted({row["dataset"] for row in rows})
    report: dict[str, Any] = {"evaluations": {}, "differences": {}, "families": {}, "datasets": {}}
    for label in labels:
        report["evaluations"][label] = _estimate(list(rates_by_task(rows, label).values()))
    for label in labels:
        kind = label.removeprefix("start-")
        if label.startswith("start-") and f"end-{kind}" in labels:
            report["differences"][kind] = _difference(rows, kind)
            if len(datasets) > 1:
                report["datasets"][kind] = {
                    name: _before_and_after(rows, kind, path) for path, name in _short_names(datasets).items()
                }
            report["families"][kind] = {
                family: {
                    when: float(np.mean(list(rates_by_task(rows, f"{when}-{kind}", family).values()) or [np.nan]))
                    for when in ("start", "end")
                }
                for family in sorted({row["family"] for row in rows if row["family"]})
            }
    return report


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return each path's file name without its ending, or the path if two have the same name."""
    stems = [Path(path).stem for path in paths]
    return {path: stem if stems.count(stem) == 1 else path for path, stem in zip(paths, stems, strict=True)}


def _before_and_after(rows: Sequence[dict[str, Any]], kind: str, dataset: str) -> dict[str, Any]:
    """Return the mean rates of a dataset's tasks before and after, and the difference with its interval."""
    rates = {when: rates_by_task(rows, f"{when}-{kind}", dataset=dataset) for when in ("start", "end")}
    means = {when: float(np.mean(list(found.values()) or [np.nan])) for when, found in rates.items()}
    return {**means, "difference": _difference([row for row in rows if row["dataset"] == dataset], kind)}


def _difference(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    before, after = rates_by_task(rows, f"start-{kind}"), rates_by_task(rows, f"end-{kind}")
    paired = sorted(before.keys() & after.keys())
    return _estimate([after[task] - before[task] for task in paired])


def _estimate(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the tasks' values with its interval, and their number."""
    found = interval(np.array(values))
    return {"mean": found.mean, "low": found.low, "high": found.high, "tasks": found.num_tasks}


def draw(
    curves: dict[str, list[tuple[int, float]]],
    reports: dict[str, dict[str, Any]],
    title: str,
    path: Path,
    controls: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Plot the mean reward of each step's batch (lines) and held-out solve rates before and after with 95% intervals
    (points).

    `controls` maps a control's name to the run whose colour it takes; controls are drawn dashed and hollow.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    own = [name for name in curves if name not in controls]
    colours = {name: f"C{own.index(controls.get(name, name))}" for name in curves}
    for name, points in curves.items():
        style = "--" if name in controls else "-"
        steps, means = [step for step, _ in points], [mean for _, mean in points]
        left.plot(steps, means, style, marker=".", color=colours[name], label=name)
    left.set(xlabel="step", ylabel="mean reward of the rollouts trained on", ylim=(0, 1))
    left.legend(fontsize=8)
    shown = [one for one in _PLACES if any(one in report["evaluations"] for report in reports.values())]
    for offset, (name, report) in enumerate(reports.items()):
        for place, label in enumerate(shown):
            if found := report["evaluations"].get(label):
                error = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]]
                fill = "none" if name in controls else "full"
                right.errorbar(
                    place + 0.12 * offset, found["mean"], yerr=error, fmt="o", fillstyle=fill, color=colours[name]
                )
    right.set_xticks(range(len(shown)), [_PLACES[one] for one in shown])
    right.set(xlim=(-0.5, len(shown) - 0.3), ylabel="held-out solve rate, 95% interval", ylim=(0, 1))
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
