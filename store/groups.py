"""Groups and their members: creation, replacement of failed members, and the rule that makes a group ready.

`rollouts.set_outcome` applies the rule in the transaction that stores the outcome. The states and their transitions are
listed at `ratchet.types.GroupState`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.payloads import GroupMember
from ratchet.types import REWARDED_OUTCOMES, GroupState, Outcome, Purpose
from store.columns import columns_of, count_rows
from store.schema import GROUP_READY_SEQ, RolloutGroupTable, RolloutTable, TaskTable

GROUP_CANCELLED = "its group was cancelled"
"""Reason of members that a cancelled group ends."""
_READY = {"state": GroupState.READY, "ready_at": func.now(), "ready_seq": GROUP_READY_SEQ.next_value()}


@dataclass(slots=True, frozen=True)
class NewGroup:
    """The row of a group; `RolloutGroupTable` describes the columns. `label`: of the evaluation, empty for training."""

    run_id: str
    group_no: int
    task_id: int
    purpose: Purpose
    size: int
    min_graded: int
    temperature: float
    started_step: int
    workflow_id: str
    label: str = ""
    forked_turn_id: int | None = None


async def create_groups(connection: AsyncConnection, groups: Sequence[NewGroup], harness: str) -> list[int]:
    """Insert groups with all their members; groups whose (run, group_no) exists are skipped. Return the new ids."""
    if not groups:
        return []
    statement = pg_insert(RolloutGroupTable).on_conflict_do_nothing().returning(RolloutGroupTable)
    rows = (await connection.execute(statement, [asdict(group) for group in groups])).all()
    members = [
        {
            "run_id": row.run_id,
            "group_id": row.id,
            "task_id": row.task_id,
            "member": member,
            "purpose": row.purpose,
            "workflow_id": f"rollout/{row.run_id}/{row.group_no}/{member}",
            "harness": harness,
            "temperature": row.temperature,
        }
        for row in rows
        for member in range(row.size)
    ]
    if members:
        await connection.execute(insert(RolloutTable), members)
    return [row.id for row in rows]


@dataclass(slots=True, frozen=True)
class GroupRow:
    """A group, its task's label, and the label of its evaluation, empty for training."""

    run_id: str
    group_no: int
    workflow_id: str
    size: int
    state: GroupState
    started_step: int
    task_label: str
    evaluation_label: str


async def get_group(connection: AsyncConnection, group_id: int) -> GroupRow:
    labels = {"task_label": TaskTable.label, "evaluation_label": RolloutGroupTable.label}
    statement = select(*columns_of(GroupRow, RolloutGroupTable, **labels))
    statement = statement.join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
    row = (await connection.execute(statement.where(RolloutGroupTable.id == group_id))).one()
    return replace(GroupRow(*row), state=GroupState(row.state))


def training_groups_of(run_id: str, state: GroupState) -> ColumnElement[bool]:
    """Return the condition for the run's training groups in a state."""
    table = RolloutGroupTable
    return (table.run_id == run_id) & (table.purpose == Purpose.TRAIN) & (table.state == state)


async def open_group_members(connection: AsyncConnection, group_id: int) -> list[GroupMember]:
    """Return the members that have no reward and no replacement, in order of their numbers."""
    statement = select(RolloutTable.id, RolloutTable.workflow_id).where(
        RolloutTable.group_id == group_id, wants_running()
    )
    return [GroupMember(*row) for row in await connection.execute(statement.order_by(RolloutTable.member))]


def wants_running() -> ColumnElement[bool]:
    """Return the condition for members that have neither a reward nor a replacement, ended or not."""
    unrewarded = RolloutTable.outcome.is_(None) | RolloutTable.outcome.not_in(REWARDED_OUTCOMES)
    return unrewarded & RolloutTable.replaced_by.is_(None)


def ended_without_verdict() -> ColumnElement[bool]:
    """Return the condition for members that have ended without a verdict and have no replacement."""
    return wants_running() & RolloutTable.outcome.is_not(None)


async def replace_member(connection: AsyncConnection, rollout_id: int, max_replacements: int) -> GroupMember | None:
    """Replace a member that has no verdict. Return None if the group is closed or its replacements are used up.

    Safe to repeat: for a member that has been replaced the existing replacement is returned.
    """
    old = (await connection.execute(select(RolloutTable).where(RolloutTable.id == rollout_id))).one()
    group = await lock_group(connection, old.group_id)
    member = select(RolloutTable.id, RolloutTable.workflow_id)
    replaced_by = select(RolloutTable.replaced_by).where(RolloutTable.id == rollout_id).scalar_subquery()
    known = (await connection.execute(member.where(RolloutTable.id == replaced_by))).one_or_none()
    if known is not None:
        return GroupMember(*known)
    if group.state != GroupState.OPEN or group.num_replacements >= max_replacements or old.outcome in REWARDED_OUTCOMES:
        return None
    return await _insert_replacement(connection, old, group.group_no)


async def lock_group(connection: AsyncConnection, group_id: int) -> Any:
    """Lock the group's row until the transaction ends, and return it."""
    return (
        await connection.execute(select(RolloutGroupTable).where(RolloutGroupTable.id == group_id).with_for_update())
    ).one()


async def _insert_replacement(connection: AsyncConnection, old: Any, group_no: int) -> GroupMember:
    """Insert a member that replaces `old`, a row of a rollout. The caller holds the lock of the group's row."""
    newest = select(func.max(RolloutTable.member)).where(RolloutTable.group_id == old.group_id)
    member = (await connection.execute(newest)).scalar_one() + 1
    workflow_id = f"rollout/{old.run_id}/{group_no}/{member}"
    copied = {
        name: getattr(old, name) for name in ("run_id", "group_id", "task_id", "purpose", "harness", "temperature")
    }
    new = insert(RolloutTable).values(**copied, member=member, workflow_id=workflow_id).returning(RolloutTable.id)
    new_id = (await connection.execute(new)).scalar_one()
    await connection.execute(update(RolloutTable).where(RolloutTable.id == old.id).values(replaced_by=new_id))
    counting = update(RolloutGroupTable).where(RolloutGroupTable.id == old.group_id)
    await connection.execute(counting.values(num_replacements=RolloutGroupTable.num_replacements + 1))
    return GroupMember(new_id, workflow_id)


async def retry_members(connection: AsyncConnection, group_id: int, rollout_id: int | None = None) -> list[GroupMember]:
    """Replace members of an open or failed group that have ended without a verdict, beyond `max_replacements`; the
    group is then open, and its run starts its workflow.

    `rollout_id`: only this member. Returns the new members; none if there is nothing to retry.
    """
    group = await lock_group(connection, group_id)
    if group.state not in (GroupState.OPEN, GroupState.FAILED):
        return []
    ended = (
        select(RolloutTable)
        .where(RolloutTable.group_id == group_id, ended_without_verdict())
        .order_by(RolloutTable.member)
    )
    if rollout_id is not None:
        ended = ended.where(RolloutTable.id == rollout_id)
    rows = (await connection.execute(ended)).all()
    new = [await _insert_replacement(connection, row, group.group_no) for row in rows]
    if new:
        opening = update(RolloutGroupTable).where(RolloutGroupTable.id == group_id)
        await connection.execute(opening.values(state=GroupState.OPEN))
    return new


async def settle_group(connection: AsyncConnection, group_id: int, accept_failed: bool) -> GroupState:
    """Apply the group's rule under its row lock and return its new state.

    A group with members that have not ended stays open. `accept_failed` False, for finalise: the group becomes ready if
    every member has a reward, else it stays open. True, if no member will be replaced any more: the group is ready with
    at least `min_graded` rewards, else failed.
    """
    group = await lock_group(connection, group_id)
    if group.state != GroupState.OPEN:
        return GroupState(group.state)
    counts = select(
        func.count(),
        func.count().filter(RolloutTable.outcome.is_(None)),
        func.count().filter(RolloutTable.outcome.in_(REWARDED_OUTCOMES)),
    ).where(RolloutTable.group_id == group_id, RolloutTable.replaced_by.is_(None))
    members, still_open, rewarded = (await connection.execute(counts)).one()
    if still_open or (rewarded < members and not accept_failed):
        return GroupState.OPEN
    state = GroupState.READY if rewarded >= group.min_graded else GroupState.FAILED
    values = _READY if state is GroupState.READY else {"state": state}
    await connection.execute(update(RolloutGroupTable).where(RolloutGroupTable.id == group_id).values(**values))
    return state


async def settle_group_again(connection: AsyncConnection, group_id: int) -> None:
    """Make a failed group ready if regrading has given it at least `min_graded` rewards."""
    group = await lock_group(connection, group_id)
    if group.state == GroupState.FAILED and await count_rewarded_members(connection, group_id) >= group.min_graded:
        await connection.execute(update(RolloutGroupTable).where(RolloutGroupTable.id == group_id).values(**_READY))


async def cancel_group(connection: AsyncConnection, group_id: int) -> bool:
    """Cancel an open or ready group and its unclaimed members; workflows cancel the rest. False for other states."""
    statement = update(RolloutGroupTable).where(
        RolloutGroupTable.id == group_id, RolloutGroupTable.state.in_([GroupState.OPEN, GroupState.READY])
    )
    cancelled = await connection.execute(statement.values(state=GroupState.CANCELLED))
    unclaimed = update(RolloutTable).where(
        RolloutTable.group_id == group_id, RolloutTable.owner.is_(None), RolloutTable.outcome.is_(None)
    )
    await connection.execute(
        unclaimed.values(outcome=Outcome.CANCELLED, outcome_reason=GROUP_CANCELLED, late=True, ended_at=func.now())
    )
    return cancelled.rowcount == 1


async def cancel_unstarted_groups(connection: AsyncConnection, run_id: str) -> None:
    """Cancel the open training groups of an ended run in which no workflow has claimed a member, with their members.

    Groups of evaluations stay open without their unclaimed members, because an evaluation may be run again: when the
    run is resumed, or by `ratchet retry`.
    """
    at_work = exists().where(
        RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.owner.is_not(None), RolloutTable.outcome.is_(None)
    )
    mine = update(RolloutGroupTable).where(training_groups_of(run_id, GroupState.OPEN), ~at_work)
    cancelling = mine.values(state=GroupState.CANCELLED).returning(RolloutGroupTable.id)
    cancelled = (await connection.execute(cancelling)).scalars().all()
    of_evaluations = select(RolloutGroupTable.id).where(
        RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.EVAL
    )
    unclaimed = RolloutTable.group_id.in_(of_evaluations) & RolloutTable.owner.is_(None)
    members = update(RolloutTable).where(
        RolloutTable.group_id.in_(cancelled) | unclaimed, RolloutTable.outcome.is_(None)
    )
    await connection.execute(
        members.values(outcome=Outcome.CANCELLED, outcome_reason="its run has ended", late=True, ended_at=func.now())
    )


async def count_groups_in_state(connection: AsyncConnection, run_id: str, state: GroupState) -> int:
    """Return the number of the run's training groups in one state; a run of weeks has few that are not consumed."""
    return await count_rows(connection, training_groups_of(run_id, state))


async def count_rewarded_members(connection: AsyncConnection, group_id: int) -> int:
    """Return the number of members with a reward that have not been replaced."""
    members = (RolloutTable.group_id == group_id) & RolloutTable.replaced_by.is_(None)
    return await count_rows(connection, members, RolloutTable.outcome.in_(REWARDED_OUTCOMES))
