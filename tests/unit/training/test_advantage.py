"""Advantages of one group, for every baseline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.errors import ConfigError
from scheduling.signal import has_signal
from training.advantage import advantages, over_batch, weigh_negative

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("std", [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_closed_forms(baseline: str, expected: list[float]) -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], baseline, "seed") == pytest.approx(expected, abs=1e-5)


@given(REWARDS)
def test_leave_one_out_compares_with_the_others(rewards: list[float]) -> None:
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert advantages(rewards, "leave_one_out", "") == pytest.approx(expected, abs=1e-9)


@given(REWARDS, st.sampled_from(["mean", "std", "leave_one_out", "shuffled"]), st.text())
def test_they_sum_to_zero(rewards: list[float], baseline: str, seed: str) -> None:
    values = advantages(rewards, baseline, seed)
    assert sum(values) == pytest.approx(0, abs=1e-6 * max(1.0, *map(abs, values)) * len(values))


@given(REWARDS, st.text())
def test_shuffled_is_a_permutation_fixed_by_the_seed(rewards: list[float], seed: str) -> None:
    shuffled = advantages(rewards, "shuffled", seed)
    assert sorted(shuffled) == sorted(advantages(rewards, "mean", ""))
    assert shuffled == advantages(rewards, "shuffled", seed)


def test_shuffles_differ_by_seed() -> None:
    rewards = [float(n) for n in range(8)]
    assert len({tuple(advantages(rewards, "shuffled", str(seed))) for seed in range(5)}) == 5


@given(st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_have_no_signal(reward: float, count: int) -> None:
    assert not has_signal([reward] * count)
    assert not has_signal([])
    assert has_signal([reward] * count + [reward + 1])


def test_over_the_batch_groups_keep_their_proportions() -> None:
    certain, split = advantages([1.0, 0.0, 0.0, 0.0], "batch", ""), advantages([1.0, 1.0, 0.0, 0.0], "batch", "")
    scaled = over_batch([*certain, *split])
    assert sum(value**2 for value in scaled) / 8 == pytest.approx(1, abs=1e-4)
    assert scaled[0] / scaled[4] == pytest.approx(0.75 / 0.5)


def squares(rewards: list[float]) -> list[float]:
    return [reward**2 for reward in rewards]


def too_few(rewards: list[float]) -> list[float]:
    return rewards[1:]


def test_a_custom_baseline() -> None:
    assert advantages([1.0, 3.0], f"{__name__}:squares", "") == [1.0, 9.0]
    with pytest.raises(ValueError, match="expected one finite number each"):
        advantages([1.0, 3.0], f"{__name__}:too_few", "")
    with pytest.raises(ConfigError, match="cannot be imported"):
        advantages([1.0, 3.0], "no_such_module:f", "")


def test_only_negative_advantages_are_weighed() -> None:
    assert [weigh_negative(value, 0.25) for value in (0.75, 0.0, -0.5)] == [0.75, 0.0, -0.125]
