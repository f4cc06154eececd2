"""The estimates against every subset of a small sample, the intervals against their coverage, McNemar's test."""

import itertools
import math

import numpy as np
import pytest

from ratchet.solve_rates import (
    SolvedCount,
    compare,
    estimate,
    interval,
    mcnemar,
    pass_all_k,
    pass_at_k,
    reported_ks,
    sign_flip_test,
)


@pytest.mark.parametrize(
    ("num_verdicts", "num_solved", "k"),
    [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)],
)
def test_estimates_are_the_mean_over_all_subsets(num_verdicts: int, num_solved: int, k: int) -> None:
    """The mean over all subsets makes the estimates unbiased, unlike 1 - (1 - c/n)^k."""
    verdicts = [True] * num_solved + [False] * (num_verdicts - num_solved)
    subsets = list(itertools.combinations(verdicts, k))
    count = SolvedCount(num_verdicts, num_solved)
    assert math.isclose(pass_at_k(count, k), sum(any(one) for one in subsets) / len(subsets), abs_tol=1e-12)
    assert math.isclose(pass_all_k(count, k), sum(all(one) for one in subsets) / len(subsets), abs_tol=1e-12)


def test_large_samples_do_not_overflow() -> None:
    assert 0.99 < pass_at_k(SolvedCount(5000, 500), 100) <= 1
    assert 0 <= pass_all_k(SolvedCount(5000, 500), 100) < 1e-90


def test_tasks_with_too_few_verdicts_are_left_out_and_counted() -> None:
    counts = [SolvedCount(4, 2), SolvedCount(1, 1), SolvedCount(0, 0)]
    assert estimate(pass_at_k, counts, 1).num_tasks == 2, "a task without a verdict is no failure"
    assert estimate(pass_at_k, counts, 1).mean == 0.75
    assert estimate(pass_all_k, counts, 2).num_tasks == 1
    assert math.isnan(estimate(pass_at_k, counts, 8).mean)


@pytest.mark.parametrize(
    ("verdicts", "ks"),
    [
        ([], []),
        ([0], []),
        ([1, 1], [1]),
        ([8, 3], [1, 2, 4, 8]),
        ([5], [1, 2, 4, 5]),
        ([8, 2, 2], [1, 2]),
        ([8, 8, 1, 0, 0], [1]),
        ([3, 0, 0], [1]),
        ([8, 7, 7, 7], [1, 2, 4, 7]),
    ],
)
def test_reported_ks(verdicts: list[int], ks: list[int]) -> None:
    assert reported_ks([SolvedCount(number, 0) for number in verdicts]) == ks


def test_the_interval_covers_the_true_mean() -> None:
    """In about 95 of 100 samples: less than that by the bootstrap's known bias at 60 tasks, never as few as 85."""
    random = np.random.default_rng(7)
    covered = 0
    for seed in range(200):
        found = interval((random.random(60) < 0.3).astype(float), seed)
        covered += found.low <= 0.3 <= found.high
    assert 0.88 * 200 <= covered <= 200


def test_a_paired_comparison_needs_both_verdicts() -> None:
    first = {"a": SolvedCount(1, 1), "b": SolvedCount(1, 0), "c": SolvedCount(1, 0), "d": SolvedCount(0, 0)}
    second = {
        "a": SolvedCount(2, 2),
        "b": SolvedCount(2, 2),
        "c": SolvedCount(2, 1),
        "d": SolvedCount(1, 1),
        "e": SolvedCount(1, 1),
    }
    found = compare(first, second)
    assert (found.first_better, found.second_better) == (0, 2)
    assert found.difference.num_tasks == 3 and math.isclose(found.difference.mean, 0.5)
    assert found.p_value == pytest.approx(0.5, abs=0.03) and found.test == "sign-flip test"
    assert found.num_left_out == 2, "d lacks a verdict in the first, e is only in the second"
    swapped = compare(second, first)
    assert (swapped.first_better, swapped.p_value) == (2, found.p_value) and math.isclose(swapped.difference.mean, -0.5)


@pytest.mark.parametrize(
    ("only_first", "only_second", "expected"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 6, 0.03125), (1, 9, 0.021484375), (10, 25, 0.0166738)],
)
def test_mcnemar(only_first: int, only_second: int, expected: float) -> None:
    """The two-sided values of the exact binomial test with p = 0.5."""
    assert math.isclose(mcnemar(only_first, only_second), expected, rel_tol=1e-5)


def test_the_sign_flip_test_is_mcnemars_with_one_rollout_per_task() -> None:
    differences = np.array([1.0] * 11 + [-1.0] * 4 + [0.0] * 20)
    assert sign_flip_test(differences) == pytest.approx(mcnemar(4, 11), abs=0.01)


@pytest.mark.parametrize("samples", [(1, 1), (2, 2), (2, 1), (8, 3)])
def test_evaluations_of_one_policy_differ_as_often_as_the_test_says(samples: tuple[int, int]) -> None:
    """Also if one has more samples: a task that is solved in half of two rollouts is no task that is solved."""
    random = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        chances = random.beta(0.5, 1.5, 60)
        counts = [
            {str(n): SolvedCount(number, int(random.binomial(number, chance))) for n, chance in enumerate(chances)}
            for number in samples
        ]
        alarms += compare(*counts).p_value < 0.05
    assert alarms <= 0.09 * 200


def test_pages_and_commands_that_read_tasks_in_another_order_print_one_interval() -> None:
    values = np.random.default_rng(7).random(60)
    assert interval(values) == interval(values[::-1])
