"""Plan rows of training steps: choose ready groups, consume them, fix advantages and token weights; and read them.

The plan row is the data cursor of a run: it is written once, in one transaction with the consumption of its groups, and
fixes everything that a replay of the step needs. No torch: planning runs in an activity worker.

    ready groups -> signal? -> advantages -> updates and weights -> plan row
                               `training/plan_builder.py`
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import GroupState
from scheduling.group_selection import has_enough_groups
from scheduling.signal import gives_gradient
from store import chains, plans, retention, training_groups
from store.chains import ChainArrays
from store.plans import PlanRow
from store.training_groups import GroupUse, ReadyGroup
from training.plan_builder import ChainLengths, denominators, draft_members, plan_members
from training.plan_types import Member, Plan, TrainingSequence

_GROUPS_PER_QUERY = 256
"""Groups of a stored run whose tokens are counted by one query."""


async def plan_step(connection: AsyncConnection, run_id: str, config: RunConfig) -> int | None:
    """Return the step to train next: the planned step that is not trained yet, else a new plan row; None without one.

    The lock on the run's row orders concurrent planners, and running it again finds the plan row of the first time.
    Unless a planned step exists, groups that cannot be trained on any more are consumed as `no_signal` or `expired`.
    """
    training = config.training
    if not await plans.lock_run_for_planning(connection, run_id):
        return None
    unfinished = await plans.unfinished_step(connection, run_id)
    if unfinished is not None:
        return unfinished
    step = await plans.newest_planned_step(connection, run_id) + 1
    if step > training.steps:
        return None
    min_policy_step = max(0, step - 1 - training.max_staleness)
    ready = await training_groups.ready_groups(connection, run_id, training.truncated, lock=True)
    without_signal = [group.group_id for group in ready if not gives_gradient(group.rewards, config)]
    await training_groups.consume_ready_groups(connection, run_id, without_signal, step, "no_signal")
    with_signal = [group for group in ready if gives_gradient(group.rewards, config)]
    lengths = await _chain_lengths(connection, with_signal, min_policy_step)
    drafts = [draft_members(group, lengths, step, config) for group in with_signal]
    useful = [members for members in drafts if _has_trained_tokens(members)]
    expired = [members[0].group_id for members in drafts if not _has_trained_tokens(members)]
    await training_groups.consume_ready_groups(connection, run_id, expired, step, "expired")
    num_consumed = await training_groups.count_consumed_groups(connection, run_id, step)
    if not has_enough_groups(len(useful), num_consumed, training):
        return None
    chosen = useful[: training.groups_per_step]
    chosen_ids = [members[0].group_id for members in chosen]
    await training_groups.consume_ready_groups(connection, run_id, chosen_ids, step, "trained")
    await _insert_plan(connection, run_id, step, min_policy_step, chosen, config)
    return step


async def plan_stored(
    connection: AsyncConnection, run_id: str, source_run_id: str, config: RunConfig, demonstrations: bool = False
) -> int:
    """Write all plan rows of a run that trains on the groups of another run; return the number of steps.

    `demonstrations`: an endpoint has answered that run: the solved rollouts of its evaluations are trained by `sft`,
    also if a group has no others.

    The rows of the source run stay as they are. Its groups are taken in the order in which they became ready. All of
    their tokens are trained: staleness has no meaning here, since this run's versions sampled none of them.
    """
    training, step = config.training, 1
    chosen: list[list[Member]] = []
    uses: list[GroupUse] = []
    states = (GroupState.READY, GroupState.CONSUMED)
    stored = await training_groups.ready_groups(
        connection, source_run_id, training.truncated, states=states, demonstrations=demonstrations
    )
    usable = {
        one.group_id for one in stored if (one.members if demonstrations else gives_gradient(one.rewards, config))
    }
    for number, group in enumerate(stored):
        if number % _GROUPS_PER_QUERY == 0:
            batch = [one for one in stored[number : number + _GROUPS_PER_QUERY] if one.group_id in usable]
            lengths = await _chain_lengths(connection, batch, 0)
        draft = draft_members(group, lengths, step, config, demonstrations) if group.group_id in usable else []
        useful = _has_trained_tokens(draft)
        uses.append(GroupUse(group.group_id, step, "trained" if useful else "expired" if draft else "no_signal"))
        chosen += [draft] if useful else []
        is_last = number == len(stored) - 1
        if len(chosen) == training.groups_per_step or (is_last and len(chosen) >= training.min_groups):
            await _insert_plan(connection, run_id, step, 0, chosen, config)
            step += 1
            chosen = []
        if step > training.steps:
            break
    left_over = {members[0].group_id for members in chosen}  # too few for one more step
    await training_groups.record_group_uses(connection, run_id, [one for one in uses if one.group_id not in left_over])
    return step - 1


async def plan_again(connection: AsyncConnection, run_id: str, config: RunConfig) -> int:
    """Write the first rows of a run that begins from step S of another: the other's after S, with the rewards of now,
    and return how many. A row with too few groups with signal is passed over. Raises ConfigError without S.

    What samples the tokens of K rows and what trains them is K - 1 steps from S at most: 2 (K - 1) <= max_staleness.
    """
    training, (source, _, common) = config.training, (config.init_from or "").rpartition("@")
    if training.steps and not (common.isdecimal() and source):
        raise ConfigError(f"retrain: init_from must be RUN@step, found {config.init_from!r}")
    if training.steps:
        await retention.require_turns(connection, source)
    step = 1
    for number in range(training.max_staleness // 2 + 1 if training.steps else 0):
        row = await plans.get_plan(connection, source, int(common) + 1 + number)
        if row is None or step > training.steps:
            break
        groups = await training_groups.ready_groups(connection, source, training.truncated, of_step=row.step)
        min_policy_step = row.knobs["min_policy_step"]
        lengths = await _chain_lengths(connection, groups, min_policy_step)
        drafts = [draft_members(one, lengths, step, config) for one in groups if gives_gradient(one.rewards, config)]
        useful = [draft for draft in drafts if _has_trained_tokens(draft)]
        chosen = {draft[0].group_id: draft for draft in useful[: training.groups_per_step]}
        if len(chosen) < training.min_groups:
            continue
        uses = {one[0].group_id: "expired" for one in drafts} | dict.fromkeys(chosen, "trained")
        surplus = {draft[0].group_id for draft in useful[training.groups_per_step :]}  # no step has used them
        groups = [one for one in groups if one.group_id not in surplus]
        used = [GroupUse(one.group_id, step, uses.get(one.group_id, "no_signal")) for one in groups]
        await training_groups.record_group_uses(connection, run_id, used)
        await _insert_plan(connection, run_id, step, min_policy_step, list(chosen.values()), config, source)
        step += 1
    return step - 1


def _has_trained_tokens(members: Sequence[Member]) -> bool:
    return any(member.num_tokens > 0 for member in members)


async def _chain_lengths(
    connection: AsyncConnection, groups: Sequence[ReadyGroup], min_policy_step: int
) -> ChainLengths:
    """Count the tokens of these groups' rollouts, in two queries for any number of groups."""
    rollout_ids = [member.rollout_id for group in groups for member in group.members]
    return ChainLengths(
        await chains.longest_chains(connection, rollout_ids),
        await chains.trained_tokens(connection, rollout_ids, min_policy_step),
    )


async def _insert_plan(
    connection: AsyncConnection,
    run_id: str,
    step: int,
    min_policy_step: int,
    drafts: Sequence[Sequence[Member]],
    config: RunConfig,
    source_run_id: str | None = None,
) -> None:
    members = plan_members(drafts, step, config)
    knobs = {
        "loss": config.loss.model_dump(),
        "updates_per_step": config.training.updates_per_step,
        "min_policy_step": min_policy_step,
        "learning_rate": config.training.learning_rate,
        **({"source_run_id": source_run_id} if source_run_id else {}),
    }
    rows = [asdict(member) for member in members]
    await plans.insert_plan(connection, run_id, PlanRow(step, rows, knobs, denominators(members), config.seed))


async def load_step_plan(connection: AsyncConnection, run_id: str, step: int) -> Plan | None:
    """Return the step's plan, or None if the step is not planned."""
    row = await plans.get_plan(connection, run_id, step)
    if row is None:
        return None
    return Plan(step, [Member(**member) for member in row.members], row.knobs["min_policy_step"], row.knobs, row.seed)


async def load_sequences(
    connection: AsyncConnection, rollout_ids: Collection[int], min_policy_step: int, with_experts: bool = False
) -> list[TrainingSequence]:
    """Return every chain of these rollouts that has a trained token, in order of (rollout, chain), by two queries.

    Tokens sampled under a policy step below `min_policy_step` are not trained. `with_experts`: with the experts that
    the engine chose. Raises ValueError for a chain whose trained tokens were sampled at different temperatures.
    """
    read = await chains.read_chains(connection, rollout_ids, with_experts=with_experts)
    found = [_training_sequence(chain, min_policy_step) for chain in read]
    return [sequence for sequence in found if sequence is not None]


def _training_sequence(chain: ChainArrays, min_policy_step: int) -> TrainingSequence | None:
    """Return the chain up to its last trained token, or None if no token is trained."""
    mask = chain.trained & (chain.policy_steps >= min_policy_step)
    if not mask.any():
        return None
    assert not mask[0], "a chain begins with context"
    end = int(np.flatnonzero(mask)[-1]) + 1
    behaviour = np.where(mask, chain.logprobs, np.float32(0))
    temperatures = np.unique(chain.temperatures[mask])
    if len(temperatures) > 1:
        raise ValueError(
            f"rollout {chain.rollout_id} was sampled at temperatures {temperatures.tolist()}; "
            "one chain has one temperature"
        )
    return TrainingSequence(
        rollout_id=chain.rollout_id,
        ids=chain.ids[:end],
        mask=mask[:end],
        behaviour=behaviour[:end],
        turn_ids=chain.turn_ids[:end],
        temperature=float(temperatures[0]),
        policy_steps=chain.policy_steps[:end],
        experts=None if chain.experts is None else chain.experts.cut(end),
    )
