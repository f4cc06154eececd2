"""Build a plan row's members from groups with rewards: advantages, updates and token weights.

Pure arithmetic, a function of its arguments and the run's seed: a benchmark simulates runs with it, and a replay finds
the same plan. No torch and no database.

    ready group -> draft_members (advantage, token count) -> plan_members (update, token weight)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from ratchet.types import TRUNCATED_EXITS
from training.advantage import advantages, over_batch, weigh_negative
from training.plan_types import Member

if TYPE_CHECKING:
    from ratchet.config import RunConfig
    from store.training_groups import ReadyGroup, ReadyMember

_LOG = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class ChainLengths:
    """Token counts per rollout id.

    `longest`: tokens of the rollout's longest chain, up to its last trained token. `trained`: trained tokens over all
    its chains.
    """

    longest: dict[int, int]
    trained: dict[int, int]


def draft_members(
    group: ReadyGroup, lengths: ChainLengths, step: int, config: RunConfig, demonstrations: bool = False
) -> list[Member]:
    """Return the group's members with advantage and token count; `update` and `weight` are still 0.

    `demonstrations`: each member is trained, with advantage 1.

    A rollout with a chain longer than `training.bin_tokens` stays in the baseline, but trains no token; the log names
    it. A chain is never truncated. (The engine's limit is below the bin's, so only imported rollouts are affected.)
    """
    seed = f"{config.seed}/{step}/{group.group_no}"
    values = [1.0] * len(group.members)
    if not demonstrations:
        values = advantages(group.rewards, config.training.advantage, seed)
    members = []
    for member, value in zip(group.members, values, strict=True):
        num_tokens = lengths.trained.get(member.rollout_id, 0)
        longest = lengths.longest.get(member.rollout_id, 0)
        if longest > config.training.bin_tokens:
            _LOG.warning(
                "rollout trains nothing: a chain is longer than training.bin_tokens",
                rollout=member.rollout_id,
                tokens=longest,
                step=step,
            )
            num_tokens = 0
        if _is_masked(member, value, config):
            num_tokens = 0
        if config.loss.chain_credit == "split":
            value /= max(1, member.num_chains)
        known = (member.rollout_id, group.group_id, member.grade_id, member.reward)
        members.append(Member(*known, value, num_tokens, 0, 0.0, group.is_fork))
    return members


def _is_masked(member: ReadyMember, advantage: float, config: RunConfig) -> bool:
    """Decide whether the config trains no token of this rollout, although its reward counts in the baseline."""
    if config.training.truncated == "mask" and member.agent_exit in TRUNCATED_EXITS:
        return True
    trains_positive_only = config.loss.preset == "sft" or config.training.negative_weight == 0
    return trains_positive_only and advantage <= 0 and not config.loss.distillation


def plan_members(drafts: Sequence[Sequence[Member]], step: int, config: RunConfig) -> list[Member]:
    """Return the step's members from the drafts of its groups, with final advantages, updates and token weights.

    Whole groups are distributed over the updates, in an order of the run's seed.
    """
    members = [member for group in drafts for member in group]
    values = [member.advantage for member in members]
    if config.training.advantage == "batch":
        values = over_batch(values)
    values = [weigh_negative(value, config.training.negative_weight) for value in values]
    weighed = [replace(member, advantage=value) for member, value in zip(members, values, strict=True)]
    groups = sorted({member.group_id for member in weighed})
    random.Random(f"{config.seed}/updates/{step}").shuffle(groups)
    update_of = {group: number % config.training.updates_per_step for number, group in enumerate(groups)}
    planned: list[Member] = []
    for number in range(config.training.updates_per_step):
        in_update = [member for member in weighed if update_of[member.group_id] == number]
        tokens = {member.rollout_id: member.num_tokens for member in in_update}
        group_of = {member.rollout_id: member.group_id for member in in_update}
        weights = reducer_weights(config.loss.reducer, tokens, group_of, config.loss.constant_tokens)
        planned += [replace(member, update=number, weight=weights.get(member.rollout_id, 0.0)) for member in in_update]
    return planned


def reducer_weights(
    reducer: str, tokens: Mapping[int, int], group_of: Mapping[int, int], constant_tokens: int
) -> dict[int, float]:
    """Return, per rollout, the weight of one of its trained tokens within one update (`loss.reducer`).

    It depends on rollouts and groups only, so no gradient depends on how turns are cut into chains, bins or ranks.
    `tokens`: rollout id -> T_i, its trained tokens over all its chains. Rollouts with T_i = 0 are not counted.
    `group_of`: rollout id -> group id. `constant_tokens`: of the reducer `constant`. Raises ValueError for others.

    token_mean    1 / sum of all T_i
    rollout_mean  1 / (number of rollouts x T_i)
    prompt_mean   1 / (number of groups x tokens of the group)
    constant      1 / (number of rollouts x constant_tokens)
    """
    trained = {rollout: count for rollout, count in tokens.items() if count > 0}
    if reducer == "token_mean":
        total = sum(trained.values())
        return dict.fromkeys(trained, 1 / total if total else 0.0)
    if reducer == "rollout_mean":
        return {rollout: 1 / (len(trained) * count) for rollout, count in trained.items()}
    if reducer == "constant":
        return dict.fromkeys(trained, 1 / (len(trained) * constant_tokens) if trained else 0.0)
    if reducer == "prompt_mean":
        group_tokens: dict[int, int] = {}
        for rollout, count in trained.items():
            group_tokens[group_of[rollout]] = group_tokens.get(group_of[rollout], 0) + count
        return {rollout: 1 / (len(group_tokens) * group_tokens[group_of[rollout]]) for rollout in trained}
    raise ValueError(f"reducer {reducer!r} is unknown; expected token_mean, rollout_mean, prompt_mean or constant")


def denominators(members: Sequence[Member]) -> list[dict[str, int]]:
    """Return trained tokens and rollouts per update, for display; the learner uses the members' weights."""
    updates = sorted({member.update for member in members})
    return [
        {
            "tokens": sum(member.num_tokens for member in members if member.update == number),
            "rollouts": sum(1 for member in members if member.update == number and member.num_tokens > 0),
        }
        for number in updates
    ]
