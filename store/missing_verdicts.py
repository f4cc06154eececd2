"""Decide whether a run must pause because verdicts are missing.

A failure without a verdict leaves its group, which biases the others. Two rules, each with a bounded query: too many
verdicts are missing, or they are missing on tasks with low (or high) rewards, which chance does not do. Only groups
that were made after the run was last resumed count.

Members of one task's groups are independent samples, so those that are left say nothing about the missing ones: groups
of different tasks are compared. Each task counts until its first group with a missing verdict, so that one hard task
with flaky tests is one piece of evidence, for however many groups it has.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import FAILED_OUTCOMES, GroupState, Outcome, Purpose
from store.schema import RolloutGroupTable, RolloutTable
from store.training_groups import since_resumed

NO_VERDICT_SHARE = 0.02
"""Share of ended rollouts without a verdict above which a run pauses."""
FALSE_PAUSE = 1e-5
"""Probability of at most this that one test pauses a run whose missing verdicts do not depend on rewards."""
_RECENT_ROLLOUTS = 500
_RECENT_GROUPS = 1000
_BLOCK = 25
"""Number of tasks that are compared with each other, by groups made around the same time, so that a trend over the run
does not count."""
_COMPARED_SHARE = 0.75
_TILTS = (-4.0, -1.5, 1.5, 4.0)
_MAX_PER_GROUP = 4
_Z = 1.96
"""Number of standard deviations of a 95% confidence interval."""


class SettledGroup(NamedTuple):
    """A settled group. `mean_reward`: of equally many members in each."""

    task_id: int
    group_no: int
    num_missing: int
    mean_reward: float


class GroupVerdicts(NamedTuple):
    """A group in the comparison. `block`: groups of equal number are compared, each of another task."""

    block: int
    num_missing: int
    mean_reward: float


async def reason_to_pause(connection: AsyncConnection, run_id: str) -> str:
    """Return why the run must pause for missing verdicts, empty if it need not."""
    return await _too_many(connection, run_id) or await _depends_on_rewards(connection, run_id)


async def _too_many(connection: AsyncConnection, run_id: str) -> str:
    """Count the newest ended rollouts. One early failure is not enough: the share must be certain to 95%."""
    newest = (
        select(RolloutTable.outcome)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(RolloutTable.run_id == run_id, RolloutTable.outcome.is_not(None), since_resumed(run_id))
        .order_by(RolloutTable.id.desc())
        .limit(_RECENT_ROLLOUTS)
        .subquery()
    )
    failed = func.count().filter(newest.c.outcome == Outcome.GRADER_FAILED)
    num_ended, num_failed = (await connection.execute(select(func.count(), failed).select_from(newest))).one()
    if _lower_bound(num_failed, num_ended) <= NO_VERDICT_SHARE:
        return ""
    return (
        f"{num_failed} of the newest {num_ended} rollouts got no verdict (grader_failed), over {NO_VERDICT_SHARE:.0%}: "
        "their failures would be missing from their groups; `ratchet show rollouts` shows the reasons"
    )


def _lower_bound(count: int, total: int) -> float:
    """Return the lower end of Wilson's 95% interval of a share."""
    if total == 0:
        return 0.0
    share = count / total
    centre = share + _Z**2 / (2 * total)
    width = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    return (centre - width) / (1 + _Z**2 / total)


async def _depends_on_rewards(connection: AsyncConnection, run_id: str) -> str:
    groups = comparable_groups(await recent_groups(connection, run_id))
    if reward_evidence(groups) < -math.log(FALSE_PAUSE):
        return ""
    with_missing = [group.mean_reward for group in groups if group.num_missing]
    complete = [group.mean_reward for group in groups if not group.num_missing]
    return (
        f"verdicts are missing in groups of {len(with_missing)} tasks, whose other members have a mean reward of "
        f"{_mean(with_missing):.2f}, and of {_mean(complete):.2f} in the {len(complete)} groups compared with them, "
        "more than chance gives: a rollout may get no verdict because of what the policy did; `ratchet show rollouts` "
        "shows the reasons"
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


async def recent_groups(connection: AsyncConnection, run_id: str) -> list[SettledGroup]:
    """Return the newest 1000 settled training groups in the order of their numbers.

    A missing verdict is a member that ended as `grader_failed` or `infra_failed`, replaced or not. The mean reward is
    that of the first three quarters of a group's size of its rewarded members: if it were of all, it would vary more in
    groups with missing verdicts. Groups with fewer rewarded members are left out.
    """
    newest = (
        select(RolloutGroupTable.id, RolloutGroupTable.group_no, RolloutGroupTable.size, RolloutGroupTable.task_id)
        .where(
            RolloutGroupTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.TRAIN,
            since_resumed(run_id),
            RolloutGroupTable.state.not_in([GroupState.OPEN, GroupState.CANCELLED]),
        )
        .order_by(RolloutGroupTable.group_no.desc())
        .limit(_RECENT_GROUPS)
        .subquery()
    )
    has_reward = RolloutTable.reward.is_not(None)
    place = func.row_number().over(partition_by=[RolloutTable.group_id, has_reward], order_by=RolloutTable.member)
    member = (
        select(
            newest.c.task_id,
            newest.c.group_no,
            newest.c.size,
            RolloutTable.outcome,
            RolloutTable.reward,
            place.label("place"),
        )
        .join(newest, newest.c.id == RolloutTable.group_id)
        .subquery()
    )
    num_compared = cast(func.ceil(member.c.size * _COMPARED_SHARE), Integer)
    statement = (
        select(
            member.c.task_id,
            member.c.group_no,
            func.count().filter(member.c.outcome.in_(FAILED_OUTCOMES)),
            func.avg(member.c.reward).filter(member.c.place <= num_compared),
        )
        .group_by(member.c.task_id, member.c.group_no, member.c.size)
        .having(func.count(member.c.reward) >= num_compared)
        .order_by(member.c.group_no)
    )
    return [SettledGroup(*row) for row in await connection.execute(statement)]


def comparable_groups(groups: Sequence[SettledGroup]) -> list[GroupVerdicts]:
    """Return the groups that are compared, by block.

    In each round every task takes part with one group, so that no task has more chances of a missing verdict than
    another; a task that has missed one takes part no more.
    """
    rounds: dict[int, list[SettledGroup]] = {}
    num_groups: dict[int, int] = {}
    has_missed: set[int] = set()
    for group in groups:
        if group.task_id in has_missed:
            continue
        number = num_groups[group.task_id] = num_groups.get(group.task_id, 0) + 1
        rounds.setdefault(number, []).append(group)
        if group.num_missing:
            has_missed.add(group.task_id)
    blocks = [found[at : at + _BLOCK] for found in rounds.values() for at in range(0, len(found), _BLOCK)]
    return [
        GroupVerdicts(number, group.num_missing, group.mean_reward)
        for number, block in enumerate(blocks)
        for group in block
    ]


def reward_evidence(groups: Sequence[GroupVerdicts]) -> float:
    """Return the logarithm of an e-value against "missing verdicts do not depend on rewards".

    If that is true, every assignment of the missing verdicts to the groups of a block is equally likely, and the
    e-value has a mean of at most 1 for any rewards, also if missing verdicts cluster in groups. So it
    exceeds 1 / p with a probability of at most p (Markov's inequality). It is the mean of exponentially tilted
    likelihood ratios, towards low and towards high rewards; the ratio of a block is bounded by sampling with
    replacement (negative association).
    """
    evidence = [0.0] * len(_TILTS)
    for _, members in groupby(groups, key=lambda group: group.block):
        block = list(members)
        rewards = [group.mean_reward for group in block]
        lowest, spread = min(rewards), max(rewards) - min(rewards)
        scaled = [(reward - lowest) / spread if spread else 0.0 for reward in rewards]  # to 0 to 1; all 0 if equal
        for group, reward in zip(block, scaled, strict=True):
            weight = min(group.num_missing, _MAX_PER_GROUP)
            if weight:
                for number, tilt in enumerate(_TILTS):
                    normaliser = math.fsum(math.exp(tilt * weight * other) for other in scaled) / len(scaled)
                    evidence[number] += tilt * weight * reward - math.log(normaliser)
    highest = max(evidence)
    return highest + math.log(math.fsum(math.exp(one - highest) for one in evidence) / len(_TILTS))
