"""The estimate of the time that is left."""

import pytest

from reads.vitals import seconds_left


def test_estimate_is_the_pace_of_the_newest_steps() -> None:
    slow_then_fast = [0.0, 100.0, 110.0, 120.0, 130.0, 140.0, 150.0]
    assert seconds_left(7, 10, slow_then_fast) == pytest.approx(30.0)


@pytest.mark.parametrize("stalled", range(5))
def test_a_stall_during_one_step_does_not_count(stalled: int) -> None:
    moments = [10.0 * step + (3600.0 if step > stalled else 0.0) for step in range(6)]
    assert seconds_left(7, 10, moments) == pytest.approx(30.0)


def test_one_step_gives_no_time_left() -> None:
    assert seconds_left(1, 10, [5.0]) is None
    assert seconds_left(0, 10, []) is None


def test_nothing_is_left_at_the_end() -> None:
    assert seconds_left(10, 10, [0.0, 10.0]) == 0.0
