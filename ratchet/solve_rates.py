"""Statistics of an evaluation: pass@k and pass^k with intervals, and the paired comparison of two evaluations.

A task's `n` verdicts, of which `c` are solved, give unbiased estimates for any k ≤ n: pass@k = 1 - C(n-c, k) / C(n, k)
is the chance that one of k rollouts solves the task (Chen et al. 2021), and pass^k = C(c, k) / C(n, k) that all of k do
(Yao et al. 2024). Rollouts without a verdict are no failures: they are left out, and counted. Intervals are bootstrap
percentiles over tasks, because the rollouts of one task are not independent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

_DRAWS = 10_000
_DRAWN_AT_ONCE = 1_000_000
"""Numbers; the draws are the same for each, and 8 MB hold them."""


@dataclass(slots=True, frozen=True)
class SolvedCount:
    """The number of a task's rollouts that have a verdict, and of those that solve it."""

    num_verdicts: int
    num_solved: int


@dataclass(slots=True, frozen=True)
class Estimate:
    """A mean over `num_tasks` tasks with its 95% interval; NaN without tasks."""

    mean: float
    low: float
    high: float
    num_tasks: int


@dataclass(slots=True, frozen=True)
class PairedComparison:
    """Two evaluations on the tasks for which both have verdicts.

    `difference`: of the solve rates, the second less the first. `first_better` and `second_better`: tasks that this one
    solves more often. `p_value`: two-sided, of the `test` (`sign_flip_test`). `num_left_out`: tasks for which only one
    evaluation, or none, has a verdict.
    """

    difference: Estimate
    first_better: int
    second_better: int
    p_value: float
    test: str
    num_left_out: int


def pass_at_k(count: SolvedCount, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k rollouts solves the task; needs k verdicts."""
    return 1 - comb(count.num_verdicts - count.num_solved, k) / comb(count.num_verdicts, k)


def pass_all_k(count: SolvedCount, k: int) -> float:
    """Return pass^k, the unbiased estimate of the chance that all of k rollouts solve the task; needs k verdicts."""
    return comb(count.num_solved, k) / comb(count.num_verdicts, k)


def interval(values: npt.NDArray[np.float64], seed: int = 0) -> Estimate:
    """Return the mean and its bootstrap interval, with 10,000 seeded draws; the same in each order of values."""
    if not len(values):
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    values = np.sort(values)
    generator, rows = np.random.default_rng(seed), max(1, _DRAWN_AT_ONCE // len(values))
    sizes = [(min(rows, _DRAWS - first), len(values)) for first in range(0, _DRAWS, rows)]
    means = np.concatenate([values[generator.integers(0, len(values), size=size)].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high), len(values))


def estimate(chance: Callable[[SolvedCount, int], float], counts: Iterable[SolvedCount], k: int) -> Estimate:
    """Return `chance`, which is `pass_at_k` or `pass_all_k`, over the tasks with at least k verdicts."""
    return interval(np.array([chance(count, k) for count in counts if count.num_verdicts >= k]))


def reported_ks(counts: Sequence[SolvedCount]) -> list[int]:
    """Return the k to report: the powers of two up to the number of verdicts that at least half of the tasks have, and
    that number.

    A larger k would be an estimate over the few tasks that have so many verdicts. 1 is reported if any task has one.
    """
    numbers = sorted((count.num_verdicts for count in counts), reverse=True)
    most = max(numbers[(len(numbers) - 1) // 2], min(numbers[0], 1)) if numbers else 0
    return sorted({k for k in (2**power for power in range(most.bit_length())) if k <= most} | ({most} - {0}))


def compare(first: Mapping[str, SolvedCount], second: Mapping[str, SolvedCount]) -> PairedComparison:
    common = [(one, second[task]) for task, one in sorted(first.items()) if task in second]
    paired = [pair for pair in common if all(one.num_verdicts for one in pair)]
    rates = np.array([[one.num_solved / one.num_verdicts for one in pair] for pair in paired]).reshape(-1, 2)
    differences = rates[:, 1] - rates[:, 0]
    first_better, second_better = int((differences < 0).sum()), int((differences > 0).sum())
    num_left_out = len(first.keys() | second.keys()) - len(paired)
    if np.isin(np.abs(differences), (0.0, 1.0)).all():  # as with one rollout per task
        p_value, test = mcnemar(first_better, second_better), "McNemar's exact test"
    else:
        p_value, test = sign_flip_test(differences), "sign-flip test"
    return PairedComparison(interval(differences), first_better, second_better, p_value, test, num_left_out)


def sign_flip_test(differences: npt.NDArray[np.float64], seed: int = 0) -> float:
    """Return the p-value of the mean of paired differences, each of which could as well have the other sign.

    With one rollout per task this is McNemar's exact test; here the signs are drawn 10,000 times.
    """
    moved = differences[differences != 0]
    signs = np.random.default_rng(seed).integers(0, 2, size=(_DRAWS, len(moved))) * 2 - 1
    as_extreme = np.abs(signs @ moved) >= abs(moved.sum()) - 1e-9
    return (1 + int(as_extreme.sum())) / (1 + _DRAWS)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the p-value of McNemar's exact test: of a fair coin that falls at least as unevenly."""
    num: int = only_first + only_second
    tail = sum(comb(num, heads) for heads in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**num))
