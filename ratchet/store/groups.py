"""Groups and their members: creation, replacement of failed members, and the rule that makes a group ready.

Why here: one file per aggregate.
Called by: `activities/rollout_records.py` and `activities/run_lifecycle.py`; `finalise` applies the rule in the same transaction as the outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import GROUP_READY_SEQ, Rollout, RolloutGroup, Task
from ratchet.types import REWARDED_OUTCOMES, GroupState, Outcome


async def create(connection: AsyncConnection, groups: Sequence[dict[str, Any]], harness: str) -> list[int]:
    """Inserts groups with all their members in two statements; idempotent by (run, group_no). Returns the ids of new groups."""
    if not groups:
        return []
    statement = (
        pg_insert(RolloutGroup)
        .on_conflict_do_nothing()
        .returning(
            RolloutGroup.id,
            RolloutGroup.run_id,
            RolloutGroup.group_no,
            RolloutGroup.task_id,
            RolloutGroup.purpose,
            RolloutGroup.size,
            RolloutGroup.temperature,
        )
    )
    rows = (await connection.execute(statement, list(groups))).all()
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
        await connection.execute(insert(Rollout), members)
    return [row.id for row in rows]


@dataclass(slots=True, frozen=True)
class GroupRow:
    run_id: str
    group_no: int
    size: int
    state: GroupState
    started_step: int
    task_label: str


async def get(connection: AsyncConnection, group_id: int) -> GroupRow:
    statement = (
        select(
            RolloutGroup.run_id,
            RolloutGroup.group_no,
            RolloutGroup.size,
            RolloutGroup.state,
            RolloutGroup.started_step,
            Task.label,
        )
        .join(Task, Task.id == RolloutGroup.task_id)
        .where(RolloutGroup.id == group_id)
    )
    row = (await connection.execute(statement)).one()
    return GroupRow(row.run_id, row.group_no, row.size, GroupState(row.state), row.started_step, row.label)


async def open_members(connection: AsyncConnection, group_id: int) -> list[tuple[int, str]]:
    """(rollout id, workflow id) of the members that have no reward yet and no replacement."""
    statement = select(Rollout.id, Rollout.workflow_id).where(Rollout.group_id == group_id, wants_running())
    return [(row[0], row[1]) for row in await connection.execute(statement.order_by(Rollout.member))]


def wants_running() -> ColumnElement[bool]:
    """A member that has no reward and no replacement: it has not ended, or whoever would have replaced it was ended first."""
    unrewarded = Rollout.outcome.is_(None) | Rollout.outcome.not_in(REWARDED_OUTCOMES)
    return unrewarded & Rollout.replaced_by.is_(None)


async def replace_member(connection: AsyncConnection, rollout_id: int, max_replacements: int) -> tuple[int, str] | None:
    """A new member in place of one without a verdict; None where the group is closed or its replacements are used up.

    Idempotent: a member that has been replaced already returns its replacement.
    """
    old = (await connection.execute(select(Rollout).where(Rollout.id == rollout_id))).one()
    statement = select(RolloutGroup.state, RolloutGroup.num_replacements, RolloutGroup.group_no)
    group = (await connection.execute(statement.where(RolloutGroup.id == old.group_id).with_for_update())).one()
    replaced_by = (await connection.execute(select(Rollout.replaced_by).where(Rollout.id == rollout_id))).scalar_one()
    if replaced_by is not None:
        workflow_id = (
            await connection.execute(select(Rollout.workflow_id).where(Rollout.id == replaced_by))
        ).scalar_one()
        return replaced_by, workflow_id
    if group.state != GroupState.OPEN or group.num_replacements >= max_replacements or old.outcome in REWARDED_OUTCOMES:
        return None
    member = (
        await connection.execute(select(func.max(Rollout.member)).where(Rollout.group_id == old.group_id))
    ).scalar_one() + 1
    workflow_id = f"rollout/{old.run_id}/{group.group_no}/{member}"
    copied = {
        name: getattr(old, name) for name in ("run_id", "group_id", "task_id", "purpose", "harness", "temperature")
    }
    new_id = (
        await connection.execute(
            insert(Rollout).values(**copied, member=member, workflow_id=workflow_id).returning(Rollout.id)
        )
    ).scalar_one()
    await connection.execute(update(Rollout).where(Rollout.id == rollout_id).values(replaced_by=new_id))
    await connection.execute(
        update(RolloutGroup)
        .where(RolloutGroup.id == old.group_id)
        .values(num_replacements=RolloutGroup.num_replacements + 1)
    )
    return new_id, workflow_id


async def settle(connection: AsyncConnection, group_id: int, accept_failed: bool) -> GroupState:
    """Applies the group's rule under its row lock and returns the state it is in now.

    All members must have ended. `accept_failed` False (finalise): only a group whose every member has a reward becomes ready.
    True (the group's workflow has no replacement left): ready with at least `min_graded` rewards, else failed.
    """
    group = (await connection.execute(select(RolloutGroup).where(RolloutGroup.id == group_id).with_for_update())).one()
    if group.state != GroupState.OPEN:
        return GroupState(group.state)
    counts = (
        await connection.execute(
            select(
                func.count(),
                func.count().filter(Rollout.outcome.is_(None)),
                func.count().filter(Rollout.outcome.in_(REWARDED_OUTCOMES)),
            ).where(Rollout.group_id == group_id, Rollout.replaced_by.is_(None))
        )
    ).one()
    members, still_open, rewarded = counts
    if still_open or (rewarded < members and not accept_failed):
        return GroupState.OPEN
    state = GroupState.READY if rewarded >= group.min_graded else GroupState.FAILED
    values: dict[str, Any] = {"state": state}
    if state is GroupState.READY:
        values |= {"ready_at": func.now(), "ready_seq": GROUP_READY_SEQ.next_value()}
    await connection.execute(update(RolloutGroup).where(RolloutGroup.id == group_id).values(**values))
    return state


async def settle_again(connection: AsyncConnection, group_id: int) -> None:
    """A group that had failed for want of verdicts is ready once regrading has given it enough of them."""
    group = (await connection.execute(select(RolloutGroup).where(RolloutGroup.id == group_id).with_for_update())).one()
    if group.state == GroupState.FAILED and await num_rewarded(connection, group_id) >= group.min_graded:
        values = {"state": GroupState.READY, "ready_at": func.now(), "ready_seq": GROUP_READY_SEQ.next_value()}
        await connection.execute(update(RolloutGroup).where(RolloutGroup.id == group_id).values(**values))


async def cancel(connection: AsyncConnection, group_id: int) -> None:
    statement = update(RolloutGroup).where(
        RolloutGroup.id == group_id, RolloutGroup.state.in_([GroupState.OPEN, GroupState.READY])
    )
    await connection.execute(statement.values(state=GroupState.CANCELLED))
    # Members that no workflow has claimed have nobody else to end them.
    unclaimed = update(Rollout).where(Rollout.group_id == group_id, Rollout.owner.is_(None), Rollout.outcome.is_(None))
    await connection.execute(
        unclaimed.values(
            outcome=Outcome.CANCELLED, outcome_reason="its group was cancelled", late=True, ended_at=func.now()
        )
    )


async def cancel_unstarted(connection: AsyncConnection, run_id: str) -> None:
    """Of a run that has ended: open groups in which no workflow is at work have nobody else to end them."""
    at_work = exists().where(Rollout.group_id == RolloutGroup.id, Rollout.owner.is_not(None), Rollout.outcome.is_(None))
    mine = update(RolloutGroup).where(RolloutGroup.run_id == run_id, RolloutGroup.state == GroupState.OPEN, ~at_work)
    cancelled = (
        (await connection.execute(mine.values(state=GroupState.CANCELLED).returning(RolloutGroup.id))).scalars().all()
    )
    members = update(Rollout).where(Rollout.group_id.in_(cancelled), Rollout.outcome.is_(None))
    await connection.execute(
        members.values(outcome=Outcome.CANCELLED, outcome_reason="its run has ended", late=True, ended_at=func.now())
    )


async def num_rewarded(connection: AsyncConnection, group_id: int) -> int:
    statement = select(func.count()).where(
        Rollout.group_id == group_id, Rollout.replaced_by.is_(None), Rollout.outcome.in_(REWARDED_OUTCOMES)
    )
    return int((await connection.execute(statement)).scalar_one())


async def workflow_of(connection: AsyncConnection, group_id: int) -> tuple[str, str]:
    """(workflow id, run id)."""
    row = (
        await connection.execute(
            select(RolloutGroup.workflow_id, RolloutGroup.run_id).where(RolloutGroup.id == group_id)
        )
    ).one()
    return row.workflow_id, row.run_id
