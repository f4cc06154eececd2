"""Batches: the plan row of a step, and the arrays that it stands for.

Why here: the plan row is the data cursor; written once in one transaction, it fixes everything a replay needs.
Called by: `activities/runs.py` and `activities/learn.py` (planning), `training/learner.py` (reading). No torch here.

    ready groups ─▶ signal? ─▶ advantages ─▶ updates ─▶ plan row ─▶ sequences of token arrays
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig, TrainingConfig
from ratchet.store import chains
from ratchet.store.schema import Batch, BatchItem, Rollout, RolloutGroup, Run
from ratchet.types import REWARDED_OUTCOMES, TRUNCATED_EXITS, BatchState, GroupState, Purpose, RunState
from training.advantage import advantages, has_signal, over_batch
from training.reducers import reducer_weights

log = structlog.get_logger()

_PATIENCE = 4
"""After so many times `max_groups_seen` groups that made no step, a run waits for a human."""


@dataclass(slots=True, frozen=True)
class Member:
    """One rollout of a plan row. `num_tokens` is T_i: its trained tokens over all chains, after the staleness bound."""

    rollout_id: int
    group_id: int
    grade_id: int | None
    reward: float
    advantage: float
    num_tokens: int
    update: int
    weight: float


@dataclass(slots=True, frozen=True)
class Plan:
    """`min_policy_step`: tokens sampled under older weights get no loss weight."""

    step: int
    members: list[Member]
    min_policy_step: int
    knobs: dict[str, Any]
    seed: int

    @property
    def num_updates(self) -> int:
        return int(self.knobs["updates_per_step"])


@dataclass(slots=True, frozen=True)
class TrainingSequence:
    """One chain as the learner trains it. All arrays have shape (T,).

    `mask`: True where the token is trained. `behaviour`: its recorded logprob there, 0 elsewhere. Position 0 is never trained.
    `turn_ids`: the turn that each token came from. `temperature`: at which every trained token of the chain was sampled.
    `policy_steps`: of the weights that sampled it, -1 for context; None where nobody asks how old they were.
    """

    rollout_id: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int64]
    temperature: float
    policy_steps: npt.NDArray[np.int32] | None = None


# ---------------------------------------------------------------- what is ready


@dataclass(slots=True, frozen=True)
class _Ready:
    """A ready group and the rollouts that enter its statistics: rows of (id, grade_id, reward, agent_exit)."""

    group_id: int
    group_no: int
    members: list[Any]

    @property
    def signal(self) -> bool:
        return has_signal([member.reward for member in self.members])


async def _ready_groups(
    connection: AsyncConnection, run_id: str, truncated: str, lock: bool = False, states: Sequence[GroupState] = (GroupState.READY,)
) -> list[_Ready]:
    """Training groups in these states, oldest first. Late and replaced members, and under `exclude` truncated ones, are no part of them.

    `lock`: they stay as they are until the transaction ends, whoever cancels them.
    """
    statement = (
        select(RolloutGroup.id, RolloutGroup.group_no)
        .where(RolloutGroup.run_id == run_id, RolloutGroup.purpose == Purpose.TRAIN, RolloutGroup.state.in_(states))
        .order_by(RolloutGroup.ready_seq)
    )
    groups = (await connection.execute(statement.with_for_update(key_share=True) if lock else statement)).all()
    rows = await connection.execute(
        select(Rollout.id, Rollout.group_id, Rollout.grade_id, Rollout.reward, Rollout.agent_exit)
        .where(Rollout.group_id.in_([group.id for group in groups]), Rollout.outcome.in_(REWARDED_OUTCOMES))
        .where(Rollout.late.is_(False), Rollout.replaced_by.is_(None))
        .order_by(Rollout.member)
    )
    members: dict[int, list[Any]] = {group.id: [] for group in groups}
    for row in rows:
        if truncated != "exclude" or row.agent_exit not in TRUNCATED_EXITS:
            members[row.group_id].append(row)
    return [_Ready(group.id, group.group_no, members[group.id]) for group in groups]


async def newest_planned_step(connection: AsyncConnection, run_id: str) -> int:
    return int((await connection.execute(select(func.max(Batch.step)).where(Batch.run_id == run_id))).scalar_one() or 0)


async def unfinished_step(connection: AsyncConnection, run_id: str) -> int | None:
    """The lowest planned step that has not been trained."""
    statement = select(func.min(Batch.step)).where(Batch.run_id == run_id, Batch.state == BatchState.PLANNED)
    return (await connection.execute(statement)).scalar_one_or_none()


def groups_to_start(training: TrainingConfig, published: int, planned: int, num_open: int, num_ready: int, num_seen: int) -> int:
    """How many groups may start now, so that none is sampled under weights too old for every step that could still take it.

    A group that starts under version `published` is of use up to step `published + 1 + max_staleness`; the steps after `planned` up to
    that one take `groups_per_step` each. `num_seen`: groups that were consumed without being trained while the next step was waited for;
    they count against `max_groups_seen`, beyond which only as many start as `min_groups` still asks for.
    """
    num_steps = min(published + 1 + training.max_staleness, training.steps) - planned
    num_held = num_open + num_ready
    room = num_steps * training.groups_per_step - num_held
    unseen = num_steps * _max_seen(training) - num_seen - num_held
    if num_open == 0:
        unseen = max(unseen, training.min_groups - num_ready)
    return max(0, min(room, unseen))


def _max_seen(training: TrainingConfig) -> int:
    return training.max_groups_seen or 2 * training.groups_per_step


async def num_seen(connection: AsyncConnection, run_id: str, step: int) -> int:
    """Groups consumed for `step`: before it is planned, those that are not trained on."""
    statement = select(func.count()).select_from(BatchItem).where(BatchItem.run_id == run_id, BatchItem.step == step)
    return int((await connection.execute(statement)).scalar_one())


async def _are_enough(connection: AsyncConnection, run_id: str, step: int, num_useful: int, training: TrainingConfig) -> bool:
    """A full step; or a smaller one where so many groups taught nothing that waiting for a full one would take for ever."""
    if num_useful >= training.groups_per_step:
        return True
    seen = await num_seen(connection, run_id, step) + num_useful
    return seen >= _max_seen(training) and num_useful >= training.min_groups


async def plannable(connection: AsyncConnection, run_id: str, training: TrainingConfig) -> bool:
    """Whether it is time for `plan_step`: a step is planned and not trained, or enough groups are ready for the next.

    Does not look at staleness: where that leaves too few groups, `plan_step` consumes the expired ones and returns None.
    """
    if await unfinished_step(connection, run_id) is not None:
        return True
    step = await newest_planned_step(connection, run_id) + 1
    if step > training.steps:
        return False
    useful = [group for group in await _ready_groups(connection, run_id, training.truncated) if group.signal]
    return await _are_enough(connection, run_id, step, len(useful), training)


async def _lock(connection: AsyncConnection, run_id: str) -> bool:
    """Orders everybody who consumes groups of this run, until the transaction ends. False where the run has ended."""
    statement = select(Run.state).where(Run.run_id == run_id).with_for_update(key_share=True)
    return (await connection.execute(statement)).scalar_one() in (RunState.RUNNING, RunState.PAUSED)


async def consume_without_signal(connection: AsyncConnection, run_id: str, training: TrainingConfig) -> None:
    """Groups whose rewards are all equal teach nothing: they are consumed as `no_signal` and make room for others.

    A run that goes on finding nothing else is paused with the reason: it would sample for ever and learn nothing.
    """
    await _lock(connection, run_id)
    ready = await _ready_groups(connection, run_id, training.truncated, lock=True)
    dull = [group.group_id for group in ready if not group.signal]
    step = await newest_planned_step(connection, run_id) + 1
    await _consume(connection, run_id, dull, step, "no_signal")
    if len(ready) - len(dull) < training.min_groups:
        await _pause_without_signal(connection, run_id, step, training)


async def _pause_without_signal(connection: AsyncConnection, run_id: str, step: int, training: TrainingConfig) -> None:
    since = select(Run.patient_from).where(Run.run_id == run_id).scalar_subquery()
    counting = select(func.count()).join(RolloutGroup, RolloutGroup.id == BatchItem.group_id)
    counting = counting.where(BatchItem.run_id == run_id, BatchItem.step == step, RolloutGroup.group_no >= since)
    count = (await connection.execute(counting.select_from(BatchItem))).scalar_one()
    if count < _PATIENCE * _max_seen(training):
        return
    reason = (
        f"{count} groups in a row gave no step {step}: the rewards within each were equal, or its tokens too old. Look at `ratchet rollouts`; "
        "other tasks, another temperature or a start from an earlier step (init_from) may help"
    )
    pausing = update(Run).where(Run.run_id == run_id, Run.state == RunState.RUNNING)
    await connection.execute(pausing.values(state=RunState.PAUSED, state_reason=reason))


async def _consume(connection: AsyncConnection, run_id: str, group_ids: Sequence[int], step: int, use: str) -> None:
    """Groups of this very run: they leave `ready` with it."""
    statement = update(RolloutGroup).where(RolloutGroup.id.in_(group_ids), RolloutGroup.state == GroupState.READY)
    result = await connection.execute(statement.values(state=GroupState.CONSUMED))
    assert result.rowcount == len(group_ids), "a group left `ready` while its row was locked"
    await _use(connection, run_id, group_ids, step, use)


async def _use(connection: AsyncConnection, run_id: str, group_ids: Sequence[int], step: int, use: str) -> None:
    """A group enters at most one step of a run: `batch_item`'s primary key refuses a second time."""
    rows = [{"run_id": run_id, "group_id": group_id, "step": step, "use": use} for group_id in group_ids]
    if rows:
        await connection.execute(insert(BatchItem), rows)


# ---------------------------------------------------------------- the plan


async def plan_step(connection: AsyncConnection, run_id: str, config: RunConfig) -> int | None:
    """The step to train next: the one that is planned already, else a new plan row; None where groups are missing.

    The run's row lock orders concurrent planners; running it again finds the row of the first time. Groups that cannot be trained on
    any more are consumed on the way, whatever is returned.
    """
    training = config.training
    if not await _lock(connection, run_id):
        return None
    unfinished = await unfinished_step(connection, run_id)
    if unfinished is not None:
        return unfinished
    step = await newest_planned_step(connection, run_id) + 1
    if step > training.steps:
        return None
    min_policy_step = max(0, step - 1 - training.max_staleness)
    ready = await _ready_groups(connection, run_id, training.truncated, lock=True)
    await _consume(connection, run_id, [group.group_id for group in ready if not group.signal], step, "no_signal")
    drafts = [await _draft(connection, group, step, min_policy_step, config) for group in ready if group.signal]
    useful = [members for members in drafts if any(member.num_tokens > 0 for member in members)]
    expired = [members[0].group_id for members in drafts if members not in useful]
    await _consume(connection, run_id, expired, step, "expired")
    if not await _are_enough(connection, run_id, step, len(useful), training):
        return None
    chosen = useful[: training.groups_per_step]
    await _consume(connection, run_id, [members[0].group_id for members in chosen], step, "trained")
    await _write(connection, run_id, step, min_policy_step, chosen, config)
    return step


async def plan_stored(connection: AsyncConnection, run_id: str, source_run_id: str, config: RunConfig) -> int:
    """Every plan row of a run that trains on the groups of another, at once; returns how many steps they make.

    The source's rows stay as they are. Its groups come in the order in which they became ready; staleness has no meaning here, since
    this run's versions sampled none of the tokens: all of them are trained.
    """
    training, step = config.training, 1
    chosen: list[list[Member]] = []
    stored = await _ready_groups(connection, source_run_id, training.truncated, states=(GroupState.READY, GroupState.CONSUMED))
    for number, group in enumerate(stored, 1):
        draft = await _draft(connection, group, step, 0, config) if group.signal else []
        useful = any(member.num_tokens > 0 for member in draft)
        await _use(connection, run_id, [group.group_id], step, "trained" if useful else "expired" if draft else "no_signal")
        chosen += [draft] if useful else []
        if len(chosen) == training.groups_per_step or (number == len(stored) and len(chosen) >= training.min_groups):
            await _write(connection, run_id, step, 0, chosen, config)
            step, chosen = step + 1, []
        if step > training.steps:
            break
    if chosen:  # too few for one more step
        rest = delete(BatchItem).where(BatchItem.run_id == run_id, BatchItem.step == step, BatchItem.use == "trained")
        await connection.execute(rest)
    return step - 1


async def _draft(connection: AsyncConnection, group: _Ready, step: int, min_policy_step: int, config: RunConfig) -> list[Member]:
    """The group's members with advantage and token count; `update` and `weight` are still 0.

    A rollout with a chain that no bin can hold (an imported one: the engine's limit is below the bin's) stays in the baseline and trains
    nothing, by name. It is never truncated.
    """
    longest = await chains.longest(connection, [row.id for row in group.members])
    tokens = await chains.trained_tokens(connection, [row.id for row in group.members], min_policy_step)
    values = advantages([row.reward for row in group.members], config.training.advantage, f"{config.seed}/{step}/{group.group_no}")
    members = []
    for row, value in zip(group.members, values, strict=True):
        masked = config.training.truncated == "mask" and row.agent_exit in TRUNCATED_EXITS
        masked |= config.loss.preset == "sft" and value <= 0  # rejection sampling: only what was better than its group is imitated
        if longest.get(row.id, 0) > config.training.bin_tokens:
            log.warning(
                "rollout trains nothing: a chain is longer than training.bin_tokens", rollout=row.id, tokens=longest[row.id], step=step
            )
            masked = True
        members.append(Member(row.id, group.group_id, row.grade_id, row.reward, value, 0 if masked else tokens.get(row.id, 0), 0, 0.0))
    return members


async def _write(
    connection: AsyncConnection, run_id: str, step: int, min_policy_step: int, chosen: Sequence[Sequence[Member]], config: RunConfig
) -> None:
    """The plan row of these groups' drafts."""
    drafts = [member for group in chosen for member in group]
    if config.training.advantage == "batch":
        values = over_batch([member.advantage for member in drafts])
        drafts = [replace(member, advantage=value) for member, value in zip(drafts, values, strict=True)]
    members = _with_updates(drafts, step, config)
    knobs = {
        "loss": config.loss.model_dump(),
        "updates_per_step": config.training.updates_per_step,
        "min_policy_step": min_policy_step,
    }
    row = {"run_id": run_id, "step": step, "knobs": knobs, "seed": config.seed}
    row |= {"members": [asdict(member) for member in members], "denominators": _denominators(members)}
    await connection.execute(insert(Batch).values(**row))


def _with_updates(drafts: Sequence[Member], step: int, config: RunConfig) -> list[Member]:
    """Whole groups are dealt to the updates in an order of the run's seed; every member gets its token weight within its update."""
    groups = sorted({draft.group_id for draft in drafts})
    random.Random(f"{config.seed}/updates/{step}").shuffle(groups)
    update_of = {group: number % config.training.updates_per_step for number, group in enumerate(groups)}
    members: list[Member] = []
    for number in range(config.training.updates_per_step):
        mine = [draft for draft in drafts if update_of[draft.group_id] == number]
        tokens = {draft.rollout_id: draft.num_tokens for draft in mine}
        group_of = {draft.rollout_id: draft.group_id for draft in mine}
        weights = reducer_weights(config.loss.reducer, tokens, group_of, config.loss.constant_tokens)
        for draft in mine:
            fixed = asdict(draft) | {"update": number, "weight": weights.get(draft.rollout_id, 0.0)}
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


async def state(connection: AsyncConnection, run_id: str, step: int) -> BatchState | None:
    found = (await connection.execute(select(Batch.state).where(Batch.run_id == run_id, Batch.step == step))).scalar_one_or_none()
    return BatchState(found) if found else None


# ---------------------------------------------------------------- reading it back


async def load_plan(connection: AsyncConnection, run_id: str, step: int) -> Plan | None:
    row = (await connection.execute(select(Batch).where(Batch.run_id == run_id, Batch.step == step))).one_or_none()
    if row is None:
        return None
    return Plan(step, [Member(**member) for member in row.members], row.knobs["min_policy_step"], row.knobs, row.seed)


@dataclass(slots=True, frozen=True)
class ConsumedGroup:
    """`use`: trained, no_signal or expired. Rewards and counts are over the rollouts that enter its statistics."""

    use: str
    lowest: float
    highest: float
    num_rollouts: int
    num_truncated: int


async def consumed_groups(connection: AsyncConnection, run_id: str, step: int) -> list[ConsumedGroup]:
    truncated = func.count().filter(Rollout.agent_exit.in_(TRUNCATED_EXITS))
    statement = (
        select(BatchItem.use, func.min(Rollout.reward), func.max(Rollout.reward), func.count(), truncated)
        .join(Rollout, Rollout.group_id == BatchItem.group_id)
        .where(BatchItem.run_id == run_id, BatchItem.step == step)
        .where(Rollout.outcome.in_(REWARDED_OUTCOMES), Rollout.late.is_(False), Rollout.replaced_by.is_(None))
        .group_by(BatchItem.group_id, BatchItem.use)
    )
    return [
        ConsumedGroup(use, float(low or 0), float(high or 0), *counts) for use, low, high, *counts in await connection.execute(statement)
    ]


async def load_sequences(connection: AsyncConnection, rollout_ids: Collection[int], min_policy_step: int) -> list[TrainingSequence]:
    """Every chain with a trained token of these rollouts, in order of (rollout, chain); two queries whatever their number."""
    sequences = []
    for chain in await chains.read(connection, rollout_ids):
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
