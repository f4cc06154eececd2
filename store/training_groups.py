"""Groups on their way into a training step: which are ready, what consumed them, and how many failed in a row.

    ready -> consumed, as trained | no_signal | expired, in the transaction that decides it

The primary key of `batch_item` (run, group) ensures that a group enters at most one step of a run. The decisions are
made in `scheduling/group_selection.py` and `training/planner.py`; this file only reads and writes rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, bindparam, cast, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import JSONB, aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.types import FAILED_OUTCOMES, REWARDED_OUTCOMES, TRUNCATED_EXITS, GroupState, Purpose
from store.columns import columns_of, count_rows, seconds_of
from store.groups import training_groups_of
from store.schema import BatchItemTable, GradeTable, RolloutGroupTable, RolloutTable, RunTable, TaskTable


@dataclass(slots=True, frozen=True)
class ReadyMember:
    """One rollout that enters the reward statistics of its group. `num_chains`: its chains with trained tokens."""

    rollout_id: int
    grade_id: int | None
    reward: float
    agent_exit: str | None
    num_chains: int


@dataclass(slots=True, frozen=True)
class ReadyGroup:
    """A group that is ready to be trained on, with the members that enter its statistics."""

    group_id: int
    group_no: int
    members: list[ReadyMember]
    is_fork: bool = False

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members]


class GroupUse(NamedTuple):
    """The step that consumed a group, and its use of the group: trained, no_signal or expired."""

    group_id: int
    step: int
    use: str


@dataclass(slots=True, frozen=True)
class ConsumedGroup:
    """`use`: trained, no_signal or expired. `rewards`: those that the step consumed it with."""

    use: str
    rewards: list[float]
    num_truncated: int


@dataclass(slots=True, frozen=True)
class FailedGroups:
    """Groups that failed in a row: how many, and their most frequent reason (None if every rollout was cancelled)."""

    count: int
    commonest_reason: str | None


async def ready_groups(
    connection: AsyncConnection,
    run_id: str,
    truncated: str,
    lock: bool = False,
    states: Sequence[GroupState] = (GroupState.READY,),
    demonstrations: bool = False,
    of_step: int | None = None,
) -> list[ReadyGroup]:
    """Return the run's training groups in these states, or the groups that its step has consumed, oldest first.

    Late and replaced rollouts are left out, and so are truncated ones if `truncated` is "exclude". `demonstrations`:
    return the groups of its evaluations instead, with solved rollouts only. `lock` locks the
    group rows until the transaction ends, so that a cancellation cannot change them meanwhile.
    """
    table, item = RolloutGroupTable, BatchItemTable
    purpose = Purpose.EVAL if demonstrations else Purpose.TRAIN
    wanted = [table.run_id == run_id, table.purpose == purpose, table.state.in_(states)]
    if of_step is not None:
        wanted = [table.id.in_(select(item.group_id).where(item.run_id == run_id, item.step == of_step))]
    statement = select(table.id, table.group_no, table.forked_turn_id).where(*wanted).order_by(table.ready_seq)
    groups = (await connection.execute(statement.with_for_update(key_share=True) if lock else statement)).all()
    columns = columns_of(ReadyMember, RolloutTable, rollout_id=RolloutTable.id)
    rewarded = (
        select(RolloutTable.group_id, *columns)
        .where(RolloutTable.group_id.in_([group.id for group in groups]), RolloutTable.outcome.in_(REWARDED_OUTCOMES))
        .where(RolloutTable.late.is_(False), RolloutTable.replaced_by.is_(None))
        .order_by(RolloutTable.member)
    )
    if demonstrations:
        solved = select(GradeTable.id).where(GradeTable.solved, ~GradeTable.rejected)
        rewarded = rewarded.where(RolloutTable.grade_id.in_(solved))
    rows = await connection.execute(rewarded)
    members: dict[int, list[ReadyMember]] = {group.id: [] for group in groups}
    for row in rows:
        if truncated != "exclude" or row.agent_exit not in TRUNCATED_EXITS:
            members[row.group_id].append(ReadyMember(*row[1:]))
    return [ReadyGroup(one.id, one.group_no, members[one.id], one.forked_turn_id is not None) for one in groups]


async def consume_ready_groups(
    connection: AsyncConnection, run_id: str, group_ids: Sequence[int], step: int, use: str
) -> None:
    """Move `ready` groups of this run to `consumed` and record their use. The caller holds the row locks."""
    statement = update(RolloutGroupTable).where(
        RolloutGroupTable.id.in_(group_ids), RolloutGroupTable.state == GroupState.READY
    )
    result = await connection.execute(statement.values(state=GroupState.CONSUMED))
    assert result.rowcount == len(group_ids), "a group left `ready` while its row was locked"
    await record_group_uses(connection, run_id, (GroupUse(group_id, step, use) for group_id in group_ids))


async def record_group_uses(connection: AsyncConnection, run_id: str, uses: Iterable[GroupUse]) -> None:
    """Record which steps consumed these groups, and their rewards. Raises IntegrityError if one was consumed before."""
    members = RolloutTable.late.is_(False), RolloutTable.replaced_by.is_(None), RolloutTable.reward.is_not(None)
    rewards = func.jsonb_agg(aggregate_order_by(RolloutTable.reward, RolloutTable.member))
    seen = select(rewards).where(RolloutTable.group_id == bindparam("of_group"), *members).scalar_subquery()
    rows = [{"run_id": run_id, "of_group": one.group_id, **one._asdict()} for one in uses]
    if rows:
        await connection.execute(insert(BatchItemTable).values(rewards=func.coalesce(seen, cast([], JSONB))), rows)


async def count_consumed_groups(connection: AsyncConnection, run_id: str, step: int) -> int:
    """Count the groups consumed for `step`; before it is planned, those that are not trained on."""
    return await count_rows(connection, BatchItemTable.run_id == run_id, BatchItemTable.step == step)


def since_resumed(run_id: str) -> ColumnElement[bool]:
    resumed = select(RunTable.patient_from).where(RunTable.run_id == run_id).scalar_subquery()
    return RolloutGroupTable.group_no >= resumed


async def count_consumed_since_resume(connection: AsyncConnection, run_id: str, step: int) -> int:
    """Count the groups consumed for `step` that were started after the run began or was last resumed."""
    counting = select(func.count()).join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
    counting = counting.where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
    counting = counting.where(RolloutGroupTable.run_id == run_id, since_resumed(run_id))
    return int((await connection.execute(counting.select_from(BatchItemTable))).scalar_one())


async def failed_groups_in_a_row(connection: AsyncConnection, run_id: str, min_count: int) -> FailedGroups | None:
    """Return groups that failed since the last success or resumption; None if fewer than `min_count`."""
    of_run = (RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
    succeeded = RolloutGroupTable.state.in_([GroupState.READY, GroupState.CONSUMED])
    newest = select(func.coalesce(func.max(RolloutGroupTable.group_no), -1)).where(*of_run, succeeded).scalar_subquery()
    later = (since_resumed(run_id), RolloutGroupTable.group_no > newest)
    failed = (training_groups_of(run_id, GroupState.FAILED), *later)
    count = await count_rows(connection, *failed)
    if count < min_count:
        return None
    reasons = (
        select(RolloutTable.outcome, RolloutTable.outcome_reason)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(*failed, RolloutTable.outcome.in_(FAILED_OUTCOMES))
        .group_by(RolloutTable.outcome, RolloutTable.outcome_reason)
        .order_by(func.count().desc())
        .limit(1)
    )
    commonest = (await connection.execute(reasons)).one_or_none()
    return FailedGroups(count, f"{commonest.outcome}: {commonest.outcome_reason}" if commonest else None)


@dataclass(slots=True, frozen=True)
class FailedGroup:
    """A training group that failed. `others_succeeded`: of the groups of other tasks that were made at about the same
    time more got their verdicts than failed, so the failure is the task's own and no outage's."""

    task_id: int
    task_label: str
    group_no: int
    others_succeeded: bool
    reason: str


async def failed_groups_since_resume(connection: AsyncConnection, run_id: str, nearby: int) -> list[FailedGroup]:
    """Return the failed groups of each task after its last success, since the run began or was last resumed. Forks
    count neither as failures nor as successes.

    `nearby`: how far away in group numbers a group of another task counts as made at about the same time.
    """
    succeeded = (GroupState.READY, GroupState.CONSUMED)
    other = aliased(RolloutGroupTable)
    of_run = (other.run_id == run_id, other.purpose == Purpose.TRAIN, other.forked_turn_id.is_(None))
    around = (
        select(func.count().filter(other.state.in_(succeeded)) > func.count().filter(other.state == GroupState.FAILED))
        .where(
            *of_run,
            other.task_id != RolloutGroupTable.task_id,
            other.group_no.between(RolloutGroupTable.group_no - nearby, RolloutGroupTable.group_no + nearby),
        )
        .scalar_subquery()
    )
    later_success = exists().where(
        *of_run,
        other.state.in_(succeeded),
        other.task_id == RolloutGroupTable.task_id,
        other.group_no > RolloutGroupTable.group_no,
    )
    reason = (
        select(RolloutTable.outcome_reason)
        .where(RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.outcome.not_in(REWARDED_OUTCOMES))
        .order_by(RolloutTable.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    statement = (
        select(
            RolloutGroupTable.task_id, TaskTable.label, RolloutGroupTable.group_no, around, func.coalesce(reason, "")
        )
        .join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
        .where(training_groups_of(run_id, GroupState.FAILED), RolloutGroupTable.forked_turn_id.is_(None))
        .where(since_resumed(run_id), ~later_success)
        .order_by(RolloutGroupTable.group_no)
    )
    return [FailedGroup(*row) for row in await connection.execute(statement)]


async def seconds_since_newest_group(connection: AsyncConnection, run_id: str) -> float | None:
    """Return the age of the run's newest group; None if it has none."""
    age = seconds_of(func.now() - RolloutGroupTable.created_at)
    statement = select(age).where(RolloutGroupTable.run_id == run_id).order_by(RolloutGroupTable.group_no.desc())
    return (await connection.execute(statement.limit(1))).scalar_one_or_none()


async def consumed_groups(connection: AsyncConnection, run_id: str, step: int) -> list[ConsumedGroup]:
    """Return every group that the step consumed."""
    truncated = func.count().filter(RolloutTable.agent_exit.in_(TRUNCATED_EXITS))
    statement = (
        select(BatchItemTable.use, BatchItemTable.rewards, truncated)
        .join(RolloutTable, RolloutTable.group_id == BatchItemTable.group_id)
        .where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
        .where(
            RolloutTable.outcome.in_(REWARDED_OUTCOMES),
            RolloutTable.late.is_(False),
            RolloutTable.replaced_by.is_(None),
        )
        .group_by(BatchItemTable.run_id, BatchItemTable.group_id)
    )
    return [ConsumedGroup(*row) for row in await connection.execute(statement)]
