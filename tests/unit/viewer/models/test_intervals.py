"""Intervals of means."""

import numpy as np
import pytest

from viewer.models.charts import mean_interval


def test_without_spread_there_is_no_interval() -> None:
    assert mean_interval(0.5, None, 1) is None
    assert mean_interval(0.5, 0.1, 1) is None


@pytest.mark.parametrize("number", [2, 5, 12, 60])
def test_it_covers_the_true_mean_about_95_times_in_100(number: int) -> None:
    random = np.random.default_rng(number)
    draws = random.normal(0.3, 0.2, size=(4000, number))
    found = [mean_interval(float(one.mean()), float(one.std(ddof=1)), number) for one in draws]
    covered = np.mean([one is not None and one[0] <= 0.3 <= one[1] for one in found])
    assert 0.935 <= covered <= 0.965
