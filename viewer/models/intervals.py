"""95% confidence intervals of means over independent units: groups of a step, tasks of an evaluation."""

from dataclasses import dataclass
from math import sqrt

_T_QUANTILES = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
    2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom."""
_NORMAL_QUANTILE = 1.96


@dataclass(slots=True, frozen=True)
class MeanInterval:
    """A mean with the bounds of its interval; both bounds are None if there is no spread to estimate them from."""

    mean: float
    low: float | None
    high: float | None


def mean_interval(mean: float, deviation: float | None, number: int) -> MeanInterval:
    """Return the interval of a mean over `number` units with this sample standard deviation.

    Rollouts of one group share a task, so the units must be groups or tasks, not rollouts.
    """
    if deviation is None or number < 2:
        return MeanInterval(mean, None, None)
    quantile = _T_QUANTILES[number - 2] if number - 2 < len(_T_QUANTILES) else _NORMAL_QUANTILE
    half = quantile * deviation / sqrt(number)
    return MeanInterval(mean, mean - half, mean + half)
