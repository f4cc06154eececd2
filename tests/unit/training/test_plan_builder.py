"""Members of a plan row from the rewards of groups: advantages, masks, updates and token weights."""

from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.store.training_groups import ReadyGroup, ReadyMember
from training.plan_builder import ChainLengths, draft_members, plan_members
from training.plan_types import Member


def make_config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "datasets": [{"path": "unused.jsonl"}],
        "sampling": {"max_response_tokens": 32, "max_context_tokens": 64},
    }
    training = {"bin_tokens": 100} | sections.pop("training", {})
    return RunConfig.model_validate(values | {"training": training} | sections)


def make_group(number: int, rewards: list[float], agent_exit: str = "done") -> ReadyGroup:
    """Return a group whose members have rollout ids 10 x number onwards."""
    members = [ReadyMember(10 * number + n, None, reward, agent_exit) for n, reward in enumerate(rewards)]
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
