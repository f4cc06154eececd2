"""A rollout's share of the loss is that of its weighted tokens; equal tokens of equal commands are one group."""

from typing import Any

import pytest

from ratchet.token_statistics import TrainedToken
from reads.rollouts import PlannedUse
from reads.steps import RatioToken, group_ratio_tokens, loss_shares, why_no_shares
from training.plan_builder import reducer_weights


def use(num_tokens: int, weight: float, advantage: float) -> PlannedUse:
    return PlannedUse(1, advantage, 0.0, num_tokens, weight)


def test_shares_are_the_sums_over_tokens() -> None:
    tokens = {1: 30, 2: 10, 3: 0, 4: 60}
    weights = reducer_weights("rollout_mean", tokens, {1: 0, 2: 0, 3: 1, 4: 1}, 50)
    advantages = {1: 0.75, 2: -0.25, 3: 0.5, 4: 0.0}
    uses = {one: use(tokens[one], weights.get(one, 0.0), advantages[one]) for one in tokens}
    by_token = {one: sum(abs(weights[one] * advantages[one]) for _ in range(tokens[one])) for one in tokens}
    assert loss_shares(uses, {"preset": "icepop"}) == pytest.approx(
        {one: part / sum(by_token.values()) for one, part in by_token.items()}
    )
    assert loss_shares(uses, {"preset": "icepop"}) == pytest.approx({1: 0.75, 2: 0.25, 3: 0, 4: 0})
    assert loss_shares(uses, {"preset": "sft", "reward_factor": 1.0}) == pytest.approx(
        {1: 1 / 3, 2: 1 / 3, 3: 0, 4: 1 / 3}
    ), "it ignores advantages"
    assert why_no_shares(uses, {"preset": "icepop"}) == ""


@pytest.mark.parametrize(
    ("uses", "loss", "why"),
    [
        ({1: use(30, 0.1, 0.5), 2: use(10, 0.1, -0.5)}, {"reward_factor": 0.0}, "loss.reward_factor is 0"),
        ({1: use(30, 0.1, 0.0), 2: use(10, 0.1, 0.0)}, {"preset": "grpo"}, "All advantages are 0"),
    ],
)
def test_a_step_without_a_policy_gradient_loss_has_no_shares(
    uses: dict[int, PlannedUse], loss: dict[str, Any], why: str
) -> None:
    assert loss_shares(uses, loss) == {1: None, 2: None}
    assert why in why_no_shares(uses, loss)


def test_a_step_without_rollouts_has_nothing_to_say() -> None:
    assert loss_shares({}, {}) == {} and why_no_shares({}, {}) == ""


def token(token_id: int, position: int, command: str) -> RatioToken:
    stored = TrainedToken(1, 2, position, token_id, -1.0, -2.0, 0.5, False)
    return RatioToken(stored, 0.37, f"t{token_id}", 0.5, command)


def test_equal_tokens_of_equal_commands_are_one_group() -> None:
    found = group_ratio_tokens([token(7, 0, "ls"), token(8, 1, "ls"), token(7, 2, "ls"), token(7, 3, "cat")])
    assert [(one.token_id, one.command, [each.token.position for each in one.tokens]) for one in found] == [
        (7, "ls", [0, 2]),
        (8, "ls", [1]),
        (7, "cat", [3]),
    ]
