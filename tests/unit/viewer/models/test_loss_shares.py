"""A rollout's share of the loss is that of its tokens, each counted with its weight and advantage."""

import pytest

from ratchet.store.views.rollout_views import PlannedUse
from training.loss_reducers import reducer_weights
from viewer.models.loss_shares import loss_shares


def use(num_tokens: int, weight: float, advantage: float) -> PlannedUse:
    return PlannedUse(1, advantage, 0.0, num_tokens, weight)


def test_shares_are_the_sums_over_tokens() -> None:
    tokens = {1: 30, 2: 10, 3: 0, 4: 60}
    weights = reducer_weights("rollout_mean", tokens, {1: 0, 2: 0, 3: 1, 4: 1}, 50)
    advantages = {1: 0.75, 2: -0.25, 3: 0.5, 4: 0.0}
    uses = {one: use(tokens[one], weights.get(one, 0.0), advantages[one]) for one in tokens}
    by_token = {one: sum(abs(weights[one] * advantages[one]) for _ in range(tokens[one])) for one in tokens}
    assert loss_shares(uses, "icepop") == pytest.approx(
        {one: part / sum(by_token.values()) for one, part in by_token.items()}
    )
    assert loss_shares(uses, "icepop") == pytest.approx({1: 0.75, 2: 0.25, 3: 0, 4: 0})
    assert loss_shares(uses, "sft") == pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 0, 4: 1 / 3}), "it ignores advantages"


def test_a_plan_row_without_weights_has_no_shares() -> None:
    assert loss_shares({1: use(30, 0.0, 0.5), 2: use(10, 0.0, -0.5)}, None) == {1: None, 2: None}
    assert loss_shares({}, None) == {}
