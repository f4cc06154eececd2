"""The test for missing verdicts that depend on rewards, on simulated runs: rarely wrong, and it finds biased ones."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.missing_verdicts import (
    FALSE_PAUSE,
    GroupVerdicts,
    SettledGroup,
    comparable_groups,
    reward_evidence,
)

LIMIT = -math.log(FALSE_PAUSE)
SIZE, COMPARED = 8, 6
Missing = Callable[[random.Random, bool, int], bool]


def by_chance(share: float) -> Missing:
    return lambda rng, solved, group: rng.random() < share


def of_failures(share: float) -> Missing:
    return lambda rng, solved, group: not solved and rng.random() < share


def of_successes(share: float) -> Missing:
    return lambda rng, solved, group: solved and rng.random() < share


def in_outages(rng: random.Random, solved: bool, group: int) -> bool:
    return group % 20 < 2 and rng.random() < 0.15


def simulate(
    seed: int, num_groups: int, missing: Missing, shape: tuple[float, float] = (1, 1), groups_per_task: int = 1
) -> list[GroupVerdicts]:
    """Simulate groups of 8. Tasks have solve rates of a beta distribution, which rise over the run; each task has
    `groups_per_task` groups on average, and some have many more than others.
    """
    rng = random.Random(seed)
    num_tasks = num_groups // groups_per_task
    rates = [rng.betavariate(*shape) for _ in range(num_tasks)]
    found = []
    for number in range(num_groups):
        task = number if groups_per_task == 1 else min(rng.randrange(num_tasks), rng.randrange(num_tasks))
        rate = min(1.0, rates[task] * (0.5 + number / num_groups))
        rewards, num_missing = [], 0
        for _ in range(SIZE):
            solved = rng.random() < rate
            if missing(rng, solved, number):
                num_missing += 1
            else:
                rewards.append(float(solved))
        if len(rewards) >= COMPARED:
            found.append(SettledGroup(task, number, num_missing, sum(rewards[:COMPARED]) / COMPARED))
    return comparable_groups(found)


SHAPES = [(1.0, 1.0), (0.5, 0.5), (0.3, 3.0), (3.0, 0.3)]


@pytest.mark.parametrize("groups_per_task", [1, 10])
@pytest.mark.parametrize("missing", [by_chance(0.02), by_chance(0.1), in_outages], ids=["few", "many", "outages"])
def test_a_thousand_unbiased_runs_are_not_paused(missing: Missing, groups_per_task: int) -> None:
    """The level of one test is 1e-5, so not one in a thousand is expected; e-values also have a mean of at most 1."""
    found = [reward_evidence(simulate(seed, 100, missing, SHAPES[seed % 4], groups_per_task)) for seed in range(1000)]
    assert max(found) < LIMIT
    assert sum(math.exp(one) > 100 for one in found) <= 10, "an e-value over 100 has a probability of at most 1%"


@pytest.mark.parametrize("missing", [of_failures(0.04), of_successes(0.04)], ids=["failures", "successes"])
@pytest.mark.parametrize(("shape", "groups_per_task"), [((1.0, 1.0), 1), ((0.5, 0.5), 1), ((0.5, 0.5), 2)])
def test_half_of_all_biased_runs_are_found(missing: Missing, shape: tuple[float, float], groups_per_task: int) -> None:
    """A share of about 2% of all verdicts, which the other rule lets pass. With fewer tasks less is found."""
    found = [reward_evidence(simulate(seed, 1000, missing, shape, groups_per_task)) for seed in range(30)]
    assert sum(one > LIMIT for one in found) >= 15, [round(one, 1) for one in found]


def test_one_hard_task_with_flaky_tests_does_not_pause_a_run() -> None:
    def groups(flaky: set[int]) -> list[SettledGroup]:
        return [
            SettledGroup(number % 20, number, 2 * (number % 20 in flaky), 0.0 if number % 20 in flaky else 1.0)
            for number in range(1000)
        ]

    assert reward_evidence(comparable_groups(groups({3}))) < LIMIT
    assert reward_evidence(comparable_groups(groups({3, 7}))) < LIMIT


def test_every_task_takes_part_once_a_round_until_it_has_missed() -> None:
    groups = [
        SettledGroup(task, number, int((task, number) == (1, 1)), 0.5) for number, task in enumerate([0, 1, 0, 1, 2])
    ]
    assert [one.block for one in comparable_groups(groups)] == [0, 0, 0, 1]


GROUPS = st.lists(
    st.builds(GroupVerdicts, st.just(0), st.integers(0, 100), st.floats(-1e6, 1e6, allow_nan=False)), max_size=40
)


@given(GROUPS, st.floats(0.01, 100), st.floats(-100, 100))
@settings(max_examples=200, deadline=None)
def test_the_scale_of_rewards_does_not_matter(groups: list[GroupVerdicts], scale: float, shift: float) -> None:
    grid = [group._replace(mean_reward=round(group.mean_reward) % 7) for group in groups]
    moved = [group._replace(mean_reward=group.mean_reward * scale + shift) for group in grid]
    assert reward_evidence(moved) == pytest.approx(reward_evidence(grid), abs=1e-6)
    assert math.isfinite(reward_evidence(groups))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=6), st.lists(st.integers(0, 5), min_size=2, max_size=6))
@settings(max_examples=100, deadline=None)
def test_the_mean_over_all_assignments_is_at_most_one(rewards: list[int], missing: list[int]) -> None:
    """The property on which the level rests, computed exactly: over all orders of the missing verdicts."""
    from itertools import permutations

    size = min(len(rewards), len(missing))
    values = [
        math.exp(reward_evidence([GroupVerdicts(0, one, r) for one, r in zip(order, rewards[:size], strict=True)]))
        for order in permutations(missing[:size])
    ]
    assert math.fsum(values) / len(values) <= 1 + 1e-9
