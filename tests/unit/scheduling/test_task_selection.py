"""The choice of tasks by their recent solve rates."""

from collections import Counter

from scheduling.task_selection import choose_tasks, mix_datasets
from store.tasks import RecentSolveRate


def rate(position: int, last: int | None, mean: float | None) -> RecentSolveRate:
    return RecentSolveRate(position, f"task {position}", position, last, mean, 0)


def chosen(rates: list[RecentSolveRate], count: int, bounds: tuple[float, float] = (0.1, 0.9)) -> list[int]:
    return [one.task_id for one in choose_tasks(rates, bounds, count)]


def test_untried_tasks_come_first_and_then_the_longest_untried() -> None:
    rates = [rate(0, 7, 0.5), rate(1, None, None), rate(2, 3, 0.5), rate(3, None, None)]
    assert chosen(rates, 4) == [1, 3, 2, 0]
    assert chosen(rates, 6) == [1, 3, 2, 0, 1, 3]


def test_always_and_never_solved_tasks_are_skipped_until_that_is_long_ago() -> None:
    assert chosen([rate(0, 1, 1.0), rate(1, 2, 0.0), rate(2, 3, 0.1), rate(3, 4, 0.9)], 3) == [2, 3, 2]
    assert chosen([rate(0, 1, None), rate(1, 2, 0.0), rate(2, 3, 0.5)], 2) == [0, 2]


def test_all_tasks_are_used_if_none_is_within_the_bounds() -> None:
    assert chosen([rate(0, 2, 1.0), rate(1, 1, 0.0)], 3) == [1, 0, 1]


def mixed(
    count: int, weights: dict[int, float], recent: dict[int, int], sizes: dict[int, int]
) -> list[RecentSolveRate]:
    rates = [
        RecentSolveRate(100 * number + n, "", 100 * number + n, None, None, number)
        for number in sizes
        for n in range(sizes[number])
    ]
    return mix_datasets(rates, None, count, weights, recent)


def test_datasets_get_their_shares_independently_of_their_sizes() -> None:
    found = mixed(40, {0: 3, 1: 1}, {}, {0: 2, 1: 50})
    assert Counter(one.dataset_no for one in found) == {0: 30, 1: 10}
    assert Counter(one.dataset_no for one in found[:8]) == {0: 6, 1: 2}, "and not one after the other"
    assert len({one.task_id for one in found if one.dataset_no == 1}) == 10, "tasks of a dataset take turns"


def test_a_dataset_that_is_behind_catches_up() -> None:
    assert {one.dataset_no for one in mixed(5, {0: 1, 1: 1}, {0: 10, 1: 5}, {0: 9, 1: 9})} == {1}


def test_a_dataset_without_weight_or_tasks_gets_no_groups() -> None:
    assert {one.dataset_no for one in mixed(6, {0: 0, 1: 1, 2: 5}, {}, {0: 9, 1: 9, 2: 0})} == {1}
    assert mixed(3, {0: 1}, {}, {0: 0}) == []
