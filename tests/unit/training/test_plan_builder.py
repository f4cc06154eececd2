"""Members of a plan row from the rewards of groups: advantages, masks, updates and token weights."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.config import RunConfig
from store.training_groups import ReadyGroup, ReadyMember
from training.plan_builder import ChainLengths, draft_members, plan_members, reducer_weights
from training.plan_types import Member


def make_config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "datasets": [{"path": "unused.jsonl"}],
        "sampling": {"max_response_tokens": 32, "max_context_tokens": 64},
    }
    training = {"bin_tokens": 100} | sections.pop("training", {})
    return RunConfig.model_validate(values | {"training": training} | sections)


def make_group(
    number: int, rewards: list[float], agent_exit: str = "done", num_chains: list[int] | None = None
) -> ReadyGroup:
    """Return a group whose members have rollout ids 10 x number onwards, and one chain unless `num_chains` says so."""
    counts = num_chains or [1] * len(rewards)
    members = [
        ReadyMember(10 * number + n, None, reward, agent_exit, count)
        for n, (reward, count) in enumerate(zip(rewards, counts, strict=True))
    ]
    return ReadyGroup(number, number, members)


def draft(config: RunConfig, *groups: ReadyGroup, longest: int = 50) -> list[list[Member]]:
    ids = [member.rollout_id for group in groups for member in group.members]
    lengths = ChainLengths(dict.fromkeys(ids, longest), dict.fromkeys(ids, 7))
    return [draft_members(group, lengths, 1, config) for group in groups]


def test_every_member_gets_its_advantage_and_trained_tokens() -> None:
    (members,) = draft(make_config(training={"advantage": "mean"}), make_group(1, [1.0, 0.0, 0.0, 0.0]))
    assert [member.advantage for member in members] == [0.75, -0.25, -0.25, -0.25]
    assert [member.num_tokens for member in members] == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("sections", "trained"),
    [
        ({"training": {"bin_tokens": 100, "negative_weight": 0.0}}, [True, False]),
        ({"loss": {"preset": "sft"}}, [True, False]),
        ({"training": {"negative_weight": 0.0}, "loss": {"distillation": 1.0, "teacher_model": "t"}}, [True, True]),
        ({"training": {"truncated": "mask"}}, [False, False]),
        ({}, [True, True]),
    ],
)
def test_masked_members_stay_in_the_baseline(sections: dict[str, Any], trained: list[bool]) -> None:
    (members,) = draft(make_config(**sections), make_group(1, [1.0, 0.0], agent_exit="turn_limit"))
    assert [member.num_tokens > 0 for member in members] == trained
    assert members[0].advantage > 0 > members[1].advantage


def test_a_chain_longer_than_a_bin_trains_nothing() -> None:
    (members,) = draft(make_config(), make_group(1, [1.0, 0.0]), longest=101)
    assert [member.num_tokens for member in members] == [0, 0]


def test_a_group_is_in_one_update_and_the_weights_of_an_update_sum_to_one() -> None:
    config = make_config(training={"updates_per_step": 2}, loss={"reducer": "token_mean"})
    members = plan_members(draft(config, *[make_group(n, [1.0, 0.0]) for n in range(1, 5)]), 1, config)
    assert all(len({one.update for one in members if one.group_id == n}) == 1 for n in range(1, 5))
    for update in (0, 1):
        in_update = [one for one in members if one.update == update]
        assert len(in_update) == 4
        assert sum(one.weight * one.num_tokens for one in in_update) == pytest.approx(1)


def test_chain_credit_split_by_hand() -> None:
    """Rewards 1, 1 and 0 with 1, 4 and 1 chains. The baseline is the rollouts' mean, 2/3, with deviation sqrt(2)/3, so
    the advantages are 1/sqrt(2), 1/sqrt(2) and -sqrt(2); each of the four chains gets a quarter of the second one."""
    group = make_group(1, [1.0, 1.0, 0.0], num_chains=[1, 4, 1])
    config = make_config(loss={"preset": "brief"})
    members = plan_members(draft(config, group), 1, config)
    assert [one.advantage for one in members] == pytest.approx([0.7071068, 0.1767767, -1.4142136], abs=1e-5)
    assert [one.weight for one in members] == pytest.approx([1 / (3 * 7)] * 3)  # 3 rollouts of 7 trained tokens
    whole = make_config(loss={"preset": "brief", "chain_credit": "whole"})
    assert [one.advantage for one in plan_members(draft(whole, group), 1, whole)] == pytest.approx(
        [0.7071068, 0.7071068, -1.4142136], abs=1e-5
    )


def test_a_rollout_without_a_trained_chain_keeps_its_advantage() -> None:
    config = make_config(loss={"preset": "brief"})
    (members,) = draft(config, make_group(1, [1.0, 0.0], num_chains=[0, 1]))
    assert [member.advantage for member in members] == pytest.approx([1.0, -1.0], abs=1e-5)


def test_the_brief_preset_sets_what_the_config_leaves_open() -> None:
    config = make_config(loss={"preset": "brief"})
    assert (config.drift, config.training.advantage, config.loss.reducer) == ("drop", "std", "rollout_mean")
    assert (config.loss.chain_credit, config.loss.clip_low, config.loss.clip_high) == ("split", 0.2, 0.28)
    own = make_config(loss={"preset": "brief", "reducer": "token_mean"}, drift="branch", training={"advantage": "mean"})
    assert (own.drift, own.training.advantage, own.loss.reducer) == ("branch", "mean", "token_mean")


TOKENS_OF = {1: 10, 2: 30, 3: 0, 4: 60}
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
def test_weights_in_closed_form(reducer: str, expected: dict[int, float]) -> None:
    assert reducer_weights(reducer, TOKENS_OF, GROUP_OF, 1000) == pytest.approx(expected)


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
