"""Groups and steps: which groups are ready, how many may start, when there are enough, and what became of each.

Why here: a group enters at most one step, and a run must neither wait for ever nor sample what no step could take.
Called by: `batch.py` (planning), `activities/run_lifecycle.py` (starting groups), `ray_learner.py` (what a step consumed). No torch here.

    ready ─▶ consumed as trained | no_signal | expired, each in the transaction that decides it
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import TrainingConfig
from ratchet.store.schema import BatchItemTable, BatchTable, RolloutGroupTable, RolloutTable, RunTable
from ratchet.types import REWARDED_OUTCOMES, TRUNCATED_EXITS, BatchState, GroupState, Outcome, Purpose, RunState
from training.advantage import has_signal

_PATIENCE = 4
"""After so many times `max_groups_seen` groups that made no step, a run waits for a human."""


@dataclass(slots=True, frozen=True)
class ReadyGroup:
    """A ready group and the rollouts that enter its statistics: rows of (id, grade_id, reward, agent_exit)."""

    group_id: int
    group_no: int
    members: list[Any]

    @property
    def signal(self) -> bool:
        return has_signal([member.reward for member in self.members])


async def ready_groups(
    connection: AsyncConnection,
    run_id: str,
    truncated: str,
    lock: bool = False,
    states: Sequence[GroupState] = (GroupState.READY,),
) -> list[ReadyGroup]:
    """Training groups in these states, oldest first. Late and replaced members, and under `exclude` truncated ones, are no part of them.

    `lock`: they stay as they are until the transaction ends, whoever cancels them.
    """
    statement = (
        select(RolloutGroupTable.id, RolloutGroupTable.group_no)
        .where(
            RolloutGroupTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.TRAIN,
            RolloutGroupTable.state.in_(states),
        )
        .order_by(RolloutGroupTable.ready_seq)
    )
    groups = (await connection.execute(statement.with_for_update(key_share=True) if lock else statement)).all()
    rows = await connection.execute(
        select(
            RolloutTable.id, RolloutTable.group_id, RolloutTable.grade_id, RolloutTable.reward, RolloutTable.agent_exit
        )
        .where(RolloutTable.group_id.in_([group.id for group in groups]), RolloutTable.outcome.in_(REWARDED_OUTCOMES))
        .where(RolloutTable.late.is_(False), RolloutTable.replaced_by.is_(None))
        .order_by(RolloutTable.member)
    )
    members: dict[int, list[Any]] = {group.id: [] for group in groups}
    for row in rows:
        if truncated != "exclude" or row.agent_exit not in TRUNCATED_EXITS:
            members[row.group_id].append(row)
    return [ReadyGroup(group.id, group.group_no, members[group.id]) for group in groups]


async def newest_planned_step(connection: AsyncConnection, run_id: str) -> int:
    return int(
        (await connection.execute(select(func.max(BatchTable.step)).where(BatchTable.run_id == run_id))).scalar_one()
        or 0
    )


async def unfinished_step(connection: AsyncConnection, run_id: str) -> int | None:
    """The lowest planned step that has not been trained."""
    statement = select(func.min(BatchTable.step)).where(
        BatchTable.run_id == run_id, BatchTable.state == BatchState.PLANNED
    )
    return (await connection.execute(statement)).scalar_one_or_none()


def groups_to_start(
    training: TrainingConfig, published: int, planned: int, num_open: int, num_ready: int, count_seen_groups: int
) -> int:
    """How many groups may start now, so that none is sampled under weights too old for every step that could still take it.

    A group that starts under version `published` is of use up to step `published + 1 + max_staleness`; the steps after `planned` up to
    that one take `groups_per_step` each. `count_seen_groups`: groups that were consumed without being trained while the next step was waited for;
    they count against `max_groups_seen`, beyond which only as many start as `min_groups` still asks for.
    """
    num_steps = min(published + 1 + training.max_staleness, training.steps) - planned
    num_held = num_open + num_ready
    room = num_steps * training.groups_per_step - num_held
    unseen = num_steps * _max_seen(training) - count_seen_groups - num_held
    if num_open == 0:
        unseen = max(unseen, training.min_groups - num_ready)
    return max(0, min(room, unseen))


def _max_seen(training: TrainingConfig) -> int:
    return training.max_groups_seen or 2 * training.groups_per_step


async def count_seen_groups(connection: AsyncConnection, run_id: str, step: int) -> int:
    """Groups consumed for `step`: before it is planned, those that are not trained on."""
    statement = (
        select(func.count())
        .select_from(BatchItemTable)
        .where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
    )
    return int((await connection.execute(statement)).scalar_one())


async def has_enough_groups(
    connection: AsyncConnection, run_id: str, step: int, num_useful: int, training: TrainingConfig
) -> bool:
    """A full step; or a smaller one where so many groups taught nothing that waiting for a full one would take for ever."""
    if num_useful >= training.groups_per_step:
        return True
    seen = await count_seen_groups(connection, run_id, step) + num_useful
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
    useful = [group for group in await ready_groups(connection, run_id, training.truncated) if group.signal]
    return await has_enough_groups(connection, run_id, step, len(useful), training)


async def lock_run(connection: AsyncConnection, run_id: str) -> bool:
    """Orders everybody who consumes groups of this run, until the transaction ends. False where the run has ended."""
    statement = select(RunTable.state).where(RunTable.run_id == run_id).with_for_update(key_share=True)
    return (await connection.execute(statement)).scalar_one() in (RunState.RUNNING, RunState.PAUSED)


async def consume_without_signal(connection: AsyncConnection, run_id: str, training: TrainingConfig) -> None:
    """Groups whose rewards are all equal teach nothing: they are consumed as `no_signal` and make room for others.

    A run that goes on finding nothing else is paused with the reason: it would sample for ever and learn nothing.
    """
    await lock_run(connection, run_id)
    ready = await ready_groups(connection, run_id, training.truncated, lock=True)
    dull = [group.group_id for group in ready if not group.signal]
    step = await newest_planned_step(connection, run_id) + 1
    await consume_groups(connection, run_id, dull, step, "no_signal")
    if len(ready) - len(dull) < training.min_groups:
        await _pause_without_signal(connection, run_id, step, training)


async def _pause_without_signal(connection: AsyncConnection, run_id: str, step: int, training: TrainingConfig) -> None:
    since = select(RunTable.patient_from).where(RunTable.run_id == run_id).scalar_subquery()
    counting = select(func.count()).join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
    counting = counting.where(
        BatchItemTable.run_id == run_id, BatchItemTable.step == step, RolloutGroupTable.group_no >= since
    )
    count = (await connection.execute(counting.select_from(BatchItemTable))).scalar_one()
    if count < _PATIENCE * _max_seen(training):
        return
    reason = (
        f"{count} groups in a row gave no step {step}: the rewards within each were equal, or its tokens too old. Look at `ratchet rollouts`; "
        "other tasks, another temperature or a start from an earlier step (init_from) may help"
    )
    await _pause(connection, run_id, reason)


async def pause_where_all_fail(connection: AsyncConnection, run_id: str, training: TrainingConfig) -> None:
    """A run none of whose groups gets its verdicts any more is paused with the commonest reason: each failure makes room for the next
    group, and agents would run for ever for a grader that is broken."""
    of_run = (RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
    since = select(RunTable.patient_from).where(RunTable.run_id == run_id).scalar_subquery()
    succeeded = RolloutGroupTable.state.in_([GroupState.READY, GroupState.CONSUMED])
    newest = select(func.coalesce(func.max(RolloutGroupTable.group_no), -1)).where(*of_run, succeeded).scalar_subquery()
    failed = (
        *of_run,
        RolloutGroupTable.state == GroupState.FAILED,
        RolloutGroupTable.group_no >= since,
        RolloutGroupTable.group_no > newest,
    )
    count = (await connection.execute(select(func.count()).where(*failed))).scalar_one()
    if count < _max_seen(training):
        return
    reasons = (
        select(RolloutTable.outcome, RolloutTable.outcome_reason)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(*failed, RolloutTable.outcome.in_([Outcome.INFRA_FAILED, Outcome.GRADER_FAILED]))
        .group_by(RolloutTable.outcome, RolloutTable.outcome_reason)
        .order_by(func.count().desc())
        .limit(1)
    )
    commonest = (await connection.execute(reasons)).one_or_none()
    why = (
        f"most often {commonest.outcome}: {commonest.outcome_reason}" if commonest else "their rollouts were cancelled"
    )
    await _pause(connection, run_id, f"{count} groups in a row got too few verdicts, {why}")


async def _pause(connection: AsyncConnection, run_id: str, reason: str) -> None:
    pausing = update(RunTable).where(RunTable.run_id == run_id, RunTable.state == RunState.RUNNING)
    await connection.execute(pausing.values(state=RunState.PAUSED, state_reason=reason))


async def consume_groups(
    connection: AsyncConnection, run_id: str, group_ids: Sequence[int], step: int, use: str
) -> None:
    """Groups of this very run: they leave `ready` with it."""
    statement = update(RolloutGroupTable).where(
        RolloutGroupTable.id.in_(group_ids), RolloutGroupTable.state == GroupState.READY
    )
    result = await connection.execute(statement.values(state=GroupState.CONSUMED))
    assert result.rowcount == len(group_ids), "a group left `ready` while its row was locked"
    await consume_group(connection, run_id, ((group_id, step, use) for group_id in group_ids))


async def consume_group(connection: AsyncConnection, run_id: str, uses: Iterable[tuple[int, int, str]]) -> None:
    """`uses`: (group, step, use). A group enters at most one step of a run: `batch_item`'s primary key refuses a second time."""
    rows = [{"run_id": run_id, "group_id": group_id, "step": step, "use": use} for group_id, step, use in uses]
    if rows:
        await connection.execute(insert(BatchItemTable), rows)


# ---------------------------------------------------------------- what a step consumed


@dataclass(slots=True, frozen=True)
class ConsumedGroup:
    """`use`: trained, no_signal or expired. Rewards and counts are over the rollouts that enter its statistics."""

    use: str
    lowest: float
    highest: float
    num_rollouts: int
    num_truncated: int


async def consumed_groups(connection: AsyncConnection, run_id: str, step: int) -> list[ConsumedGroup]:
    truncated = func.count().filter(RolloutTable.agent_exit.in_(TRUNCATED_EXITS))
    statement = (
        select(
            BatchItemTable.use, func.min(RolloutTable.reward), func.max(RolloutTable.reward), func.count(), truncated
        )
        .join(RolloutTable, RolloutTable.group_id == BatchItemTable.group_id)
        .where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
        .where(
            RolloutTable.outcome.in_(REWARDED_OUTCOMES),
            RolloutTable.late.is_(False),
            RolloutTable.replaced_by.is_(None),
        )
        .group_by(BatchItemTable.group_id, BatchItemTable.use)
    )
    return [
        ConsumedGroup(use, float(low or 0), float(high or 0), *counts)
        for use, low, high, *counts in await connection.execute(statement)
    ]
