"""The condition that holds new groups back, and the number that may start then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.circuit_breaker import MIN_COUNT, groups_allowed, reason_to_hold_back
from store.box_failures import BoxCounts


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (BoxCounts(0, 0, 0, 0, ""), ""),
        (BoxCounts(5, 5, 0, 0, "busy"), ""),  # too few to judge by
        (BoxCounts(20, 10, 20, 10, "busy"), ""),  # half, not over half
        (BoxCounts(20, 11, 0, 0, "no room"), "11 of the 20 newest boots of boxes failed; the last error: no room"),
        (BoxCounts(20, 11, 0, 0, ""), "11 of the 20 newest boots of boxes failed"),
        (BoxCounts(40, 0, 7, 4, ""), "4 of the 7 newest grading boxes gave no verdict"),
    ],
)
def test_over_half_of_enough_boots_or_grades_must_fail(counts: BoxCounts, words: str) -> None:
    assert reason_to_hold_back(counts) == words


@pytest.mark.parametrize(
    ("wanted", "reason", "seconds", "allowed"),
    [(8, "", 0.0, 8), (8, "broken", 59.0, 0), (8, "broken", 60.0, 1), (8, "broken", None, 1), (0, "broken", 99.0, 0)],
)
def test_one_group_a_minute_tries_whether_it_works_again(
    wanted: int, reason: str, seconds: float | None, allowed: int
) -> None:
    assert groups_allowed(wanted, reason, seconds) == allowed


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_breaker_opens_exactly_above_one_half(failed: int, succeeded: int) -> None:
    opened = bool(reason_to_hold_back(BoxCounts(failed + succeeded, failed, 0, 0, "")))
    assert opened is (failed + succeeded >= MIN_COUNT and failed > succeeded)
