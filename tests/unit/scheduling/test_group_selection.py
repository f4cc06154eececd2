"""The number of groups that may start, and the condition that enough are ready for a step."""

from typing import NamedTuple

import pytest

from ratchet.config import TrainingConfig
from scheduling.group_selection import groups_to_start, groups_with_room, has_enough_groups


class Case(NamedTuple):
    """The state of a run with 10 steps of 4 groups, and how many groups may start."""

    max_staleness: int
    published: int
    planned: int
    num_open: int
    num_ready: int
    num_seen: int
    expected: int


CASES = {
    "nothing is on its way": Case(0, 0, 0, 0, 0, 0, 4),
    "three are on their way": Case(0, 0, 0, 2, 1, 0, 1),
    "tokens would be too old for step 2": Case(0, 0, 1, 0, 0, 0, 0),
    "step 2 may be one step stale": Case(1, 0, 1, 0, 0, 0, 4),
    "two steps may be filled": Case(1, 0, 0, 0, 3, 0, 5),
    "six seen: those on their way are enough": Case(0, 0, 0, 1, 1, 4, 0),
    "six seen: min_groups needs one more": Case(0, 0, 0, 0, 1, 5, 1),
    "the last step is planned": Case(0, 9, 10, 0, 0, 0, 0),
    "only one step is left": Case(1, 8, 9, 1, 0, 0, 3),
}


def training(**values: int) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"steps": 10, "groups_per_step": 4, "max_groups_seen": 6, "min_groups": 2} | values
    )


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_no_group_starts_that_no_step_can_take(case: Case) -> None:
    state = (case.published, case.planned, case.num_open, case.num_ready, case.num_seen)
    assert groups_to_start(training(max_staleness=case.max_staleness), *state) == case.expected


@pytest.mark.parametrize(
    ("num_useful", "num_consumed", "enough"),
    [(4, 0, True), (3, 0, False), (3, 3, True), (2, 4, True), (2, 3, False), (1, 9, False)],
)
def test_a_smaller_step_needs_min_groups_and_max_groups_seen(num_useful: int, num_consumed: int, enough: bool) -> None:
    assert has_enough_groups(num_useful, num_consumed, training()) is enough


@pytest.mark.parametrize(
    ("num_open", "max_open", "groups"),
    [(0, 64, 8), (1, 64, 8), (8, 64, 7), (63, 64, 1), (64, 64, 0), (99, 64, 0), (0, 4, 1), (3, 4, 1), (4, 4, 0)],
)
def test_only_groups_that_can_run_soon_are_opened(num_open: int, max_open: int, groups: int) -> None:
    """Also those of a config whose group has more members than rollouts may be open: one after the other."""
    assert groups_with_room(num_open, max_open, group_size=8) == groups
