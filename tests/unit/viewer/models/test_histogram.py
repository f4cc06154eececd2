"""Bins of rewards hold every rollout once, and their links select exactly these rewards."""

from urllib.parse import parse_qs, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from viewer.models.histogram import reward_bins

COUNTS = st.dictionaries(st.floats(-10, 10), st.integers(1, 1000), max_size=40)


@given(COUNTS)
def test_every_rollout_is_in_one_bin(counts: dict[float, int]) -> None:
    bins = reward_bins("r", dict(sorted(counts.items())))
    assert sum(one.number for one in bins) == sum(counts.values())
    for one in bins:
        query = parse_qs(urlsplit(one.link).query)
        low, high = float(query["reward_from"][0]), float(query["reward_to"][0])
        assert sum(number for reward, number in counts.items() if low <= reward <= high) == one.number
    assert not bins or max(one.share for one in bins) == 1
