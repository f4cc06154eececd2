"""Token weights of every reducer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.loss_reducers import reducer_weights

TOKENS = {1: 10, 2: 30, 3: 0, 4: 60}
GROUP_OF = {1: 1, 2: 1, 3: 2, 4: 2}


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        ("token_mean", {1: 1 / 100, 2: 1 / 100, 4: 1 / 100}),
        ("rollout_mean", {1: 1 / 30, 2: 1 / 90, 4: 1 / 180}),
        ("prompt_mean", {1: 1 / 80, 2: 1 / 80, 4: 1 / 120}),
        ("constant", {1: 1 / 3000, 2: 1 / 3000, 4: 1 / 3000}),
    ],
)
def test_closed_forms(reducer: str, expected: dict[int, float]) -> None:
    assert reducer_weights(reducer, TOKENS, GROUP_OF, 1000) == pytest.approx(expected)


@given(
    st.sampled_from(["token_mean", "rollout_mean", "prompt_mean"]),
    st.dictionaries(st.integers(0, 30), st.integers(0, 500), min_size=1),
)
def test_a_mean_of_ones_is_one(reducer: str, tokens: dict[int, int]) -> None:
    weights = reducer_weights(reducer, tokens, {rollout: rollout % 5 for rollout in tokens}, 1)
    assert sum(weights[rollout] * count for rollout, count in tokens.items() if count) == pytest.approx(
        1 if any(tokens.values()) else 0
    )


@pytest.mark.parametrize("reducer", ["token_mean", "rollout_mean", "prompt_mean", "constant"])
def test_nothing_trained(reducer: str) -> None:
    assert reducer_weights(reducer, {}, {}, 10) == reducer_weights(reducer, {1: 0}, {1: 1}, 10) == {}


def test_an_unknown_reducer_is_named() -> None:
    with pytest.raises(ValueError, match="'sum' is unknown"):
        reducer_weights("sum", {}, {}, 1)
