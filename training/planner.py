"""Batches: the plan row of a step, and the arrays that it stands for.

Why here: the plan row is the data cursor; written once in one transaction, it fixes everything a replay needs.
Called by: `activities/run_lifecycle.py` and `activities/learning.py` (planning), `training/learner.py` (reading). No torch here.

    ready groups ─▶ signal? ─▶ advantages ─▶ updates ─▶ plan row ─▶ sequences of token arrays
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import structlog
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.store import chains
from ratchet.store.schema import BatchTable
from ratchet.types import TRUNCATED_EXITS, BatchState, GroupState
from training.advantage import advantages, over_batch, weigh_negative
from training.group_selection import (
    ReadyGroup,
    consume_group,
    consume_groups,
    has_enough_groups,
    lock_run,
    newest_planned_step,
    ready_groups,
    unfinished_step,
)
from training.plan_types import Member, Plan, TrainingSequence
from training.token_weights import reducer_weights

_LOG = structlog.get_logger()

_AT_ONCE = 256
"""Groups of a stored run whose tokens are counted by one query."""


# ---------------------------------------------------------------- the plan


async def plan_step(connection: AsyncConnection, run_id: str, config: RunConfig) -> int | None:
    """The step to train next: the one that is planned already, else a new plan row; None where groups are missing.

    The run's row lock orders concurrent planners; running it again finds the row of the first time. Groups that cannot be trained on
    any more are consumed on the way, whatever is returned.
    """
    training = config.training
    if not await lock_run(connection, run_id):
        return None
    unfinished = await unfinished_step(connection, run_id)
    if unfinished is not None:
        return unfinished
    step = await newest_planned_step(connection, run_id) + 1
    if step > training.steps:
        return None
    min_policy_step = max(0, step - 1 - training.max_staleness)
    ready = await ready_groups(connection, run_id, training.truncated, lock=True)
    await consume_groups(connection, run_id, [group.group_id for group in ready if not group.signal], step, "no_signal")
    telling = [group for group in ready if group.signal]
    lengths = await _lengths(connection, telling, min_policy_step)
    drafts = [draft_plan(group, lengths, step, config) for group in telling]
    useful = [members for members in drafts if any(member.num_tokens > 0 for member in members)]
    expired = [members[0].group_id for members in drafts if members not in useful]
    await consume_groups(connection, run_id, expired, step, "expired")
    if not await has_enough_groups(connection, run_id, step, len(useful), training):
        return None
    chosen = useful[: training.groups_per_step]
    await consume_groups(connection, run_id, [members[0].group_id for members in chosen], step, "trained")
    await _write(connection, run_id, step, min_policy_step, chosen, config)
    return step


async def plan_stored(connection: AsyncConnection, run_id: str, source_run_id: str, config: RunConfig) -> int:
    """Every plan row of a run that trains on the groups of another, at once; returns how many steps they make.

    The source's rows stay as they are. Its groups come in the order in which they became ready; staleness has no meaning here, since
    this run's versions sampled none of the tokens: all of them are trained.
    """
    training, step = config.training, 1
    chosen: list[list[Member]] = []
    uses: list[tuple[int, int, str]] = []
    stored = await ready_groups(
        connection, source_run_id, training.truncated, states=(GroupState.READY, GroupState.CONSUMED)
    )
    for at, group in enumerate(stored):
        if at % _AT_ONCE == 0:
            lengths = await _lengths(connection, [one for one in stored[at : at + _AT_ONCE] if one.signal], 0)
        drafted = draft_plan(group, lengths, step, config) if group.signal else []
        useful = any(member.num_tokens > 0 for member in drafted)
        uses.append((group.group_id, step, "trained" if useful else "expired" if drafted else "no_signal"))
        chosen += [drafted] if useful else []
        if len(chosen) == training.groups_per_step or (at == len(stored) - 1 and len(chosen) >= training.min_groups):
            await _write(connection, run_id, step, 0, chosen, config)
            step, chosen = step + 1, []
        if step > training.steps:
            break
    too_few = {members[0].group_id for members in chosen}  # for one more step
    await consume_group(connection, run_id, [one for one in uses if one[0] not in too_few])
    return step - 1


@dataclass(slots=True, frozen=True)
class ChainLengths:
    """Per rollout: tokens of its longest chain up to the last trained one, and trained tokens over all chains."""

    longest: dict[int, int]
    trained: dict[int, int]


async def _lengths(connection: AsyncConnection, groups: Sequence[ReadyGroup], min_policy_step: int) -> ChainLengths:
    """Two queries, however many groups."""
    rollout_ids = [row.id for group in groups for row in group.members]
    return ChainLengths(
        await chains.longest_chains(connection, rollout_ids),
        await chains.trained_tokens(connection, rollout_ids, min_policy_step),
    )


def draft_plan(group: ReadyGroup, lengths: ChainLengths, step: int, config: RunConfig) -> list[Member]:
    """The group's members with advantage and token count; `update` and `weight` are still 0.

    A rollout with a chain that no bin can hold (an imported one: the engine's limit is below the bin's) stays in the baseline and trains
    nothing, by name. It is never truncated.
    """
    values = advantages(
        [row.reward for row in group.members], config.training.advantage, f"{config.seed}/{step}/{group.group_no}"
    )
    members = []
    for row, value in zip(group.members, values, strict=True):
        masked = config.training.truncated == "mask" and row.agent_exit in TRUNCATED_EXITS
        positive_only = config.loss.preset == "sft" or config.training.negative_weight == 0
        masked |= positive_only and value <= 0  # only what was better than its group is trained
        if lengths.longest.get(row.id, 0) > config.training.bin_tokens:
            tokens = lengths.longest[row.id]
            _LOG.warning(
                "rollout trains nothing: a chain is longer than training.bin_tokens",
                rollout=row.id,
                tokens=tokens,
                step=step,
            )
            masked = True
        num_tokens = 0 if masked else lengths.trained.get(row.id, 0)
        members.append(Member(row.id, group.group_id, row.grade_id, row.reward, value, num_tokens, 0, 0.0))
    return members


def plan_of_draft(chosen: Sequence[Sequence[Member]], step: int, config: RunConfig) -> list[Member]:
    """The step's members from its groups' drafts: final advantages, updates and token weights."""
    drafts = [member for group in chosen for member in group]
    values = [member.advantage for member in drafts]
    if config.training.advantage == "batch":
        values = over_batch(values)
    values = [weigh_negative(value, config.training.negative_weight) for value in values]
    drafts = [replace(member, advantage=value) for member, value in zip(drafts, values, strict=True)]
    return _with_updates(drafts, step, config)


async def _write(
    connection: AsyncConnection,
    run_id: str,
    step: int,
    min_policy_step: int,
    chosen: Sequence[Sequence[Member]],
    config: RunConfig,
) -> None:
    """The plan row of these groups' drafts."""
    members = plan_of_draft(chosen, step, config)
    knobs = {
        "loss": config.loss.model_dump(),
        "updates_per_step": config.training.updates_per_step,
        "min_policy_step": min_policy_step,
    }
    row = {"run_id": run_id, "step": step, "knobs": knobs, "seed": config.seed}
    row |= {"members": [asdict(member) for member in members], "denominators": _denominators(members)}
    await connection.execute(insert(BatchTable).values(**row))


def _with_updates(drafts: Sequence[Member], step: int, config: RunConfig) -> list[Member]:
    """Whole groups are dealt to the updates in an order of the run's seed; every member gets its token weight within its update."""
    groups = sorted({draft_plan.group_id for draft_plan in drafts})
    random.Random(f"{config.seed}/updates/{step}").shuffle(groups)
    update_of = {group: number % config.training.updates_per_step for number, group in enumerate(groups)}
    members: list[Member] = []
    for number in range(config.training.updates_per_step):
        mine = [draft_plan for draft_plan in drafts if update_of[draft_plan.group_id] == number]
        tokens = {draft_plan.rollout_id: draft_plan.num_tokens for draft_plan in mine}
        group_of = {draft_plan.rollout_id: draft_plan.group_id for draft_plan in mine}
        weights = reducer_weights(config.loss.reducer, tokens, group_of, config.loss.constant_tokens)
        for draft_plan in mine:
            fixed = asdict(draft_plan) | {"update": number, "weight": weights.get(draft_plan.rollout_id, 0.0)}
            members.append(Member(**fixed))
    return members


def _denominators(members: Sequence[Member]) -> list[dict[str, int]]:
    """Per update: trained tokens and rollouts, for people; the weights above are what the learner uses."""
    updates = sorted({member.update for member in members})
    return [
        {
            "tokens": sum(member.num_tokens for member in members if member.update == number),
            "rollouts": sum(1 for member in members if member.update == number and member.num_tokens > 0),
        }
        for number in updates
    ]


async def plan_state(connection: AsyncConnection, run_id: str, step: int) -> BatchState | None:
    found = (
        await connection.execute(select(BatchTable.state).where(BatchTable.run_id == run_id, BatchTable.step == step))
    ).scalar_one_or_none()
    return BatchState(found) if found else None


# ---------------------------------------------------------------- reading it back


async def load_plan_row(connection: AsyncConnection, run_id: str, step: int) -> Plan | None:
    row = (
        await connection.execute(select(BatchTable).where(BatchTable.run_id == run_id, BatchTable.step == step))
    ).one_or_none()
    if row is None:
        return None
    return Plan(step, [Member(**member) for member in row.members], row.knobs["min_policy_step"], row.knobs, row.seed)


async def load_sequences(
    connection: AsyncConnection, rollout_ids: Collection[int], min_policy_step: int
) -> list[TrainingSequence]:
    """Every chain with a trained token of these rollouts, in order of (rollout, chain); two queries whatever their number."""
    sequences = []
    for chain in await chains.read_chains(connection, rollout_ids):
        mask = chain.trained & (chain.policy_steps >= min_policy_step)
        if not mask.any():
            continue
        assert not mask[0], "a chain begins with context"
        end = int(np.flatnonzero(mask)[-1]) + 1  # context after the last trained token trains nothing
        behaviour = np.where(mask, chain.logprobs, np.float32(0))
        temperatures = np.unique(chain.temperatures[mask])
        if len(temperatures) > 1:
            raise ValueError(
                f"rollout {chain.rollout_id} was sampled at temperatures {temperatures.tolist()}; one chain has one temperature"
            )
        arrays = (chain.ids[:end], mask[:end], behaviour[:end], chain.turn_ids[:end])
        sequences.append(TrainingSequence(chain.rollout_id, *arrays, float(temperatures[0]), chain.policy_steps[:end]))
    return sequences
