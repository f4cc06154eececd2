"""Rollouts and their attempts: who owns a rollout, which try of a stage may write, and the one transaction that ends it.

Why here: one file per aggregate; these statements are what keeps a verdict from being lost, doubled or invented.
Called by: `activities/` (every stage) and the sweep.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import BugError, FencedError
from ratchet.store import groups, sandboxes
from ratchet.store.schema import Attempt, BatchItem, Patch, Rollout, RolloutGroup, Session, Turn
from ratchet.types import AgentExit, AttemptState, GroupState, Outcome, SessionState, TurnState


@dataclass(slots=True, frozen=True)
class Claimed:
    run_id: str
    group_id: int | None
    task_id: int
    outcome: str | None
    reward: float | None
    attempt: int
    patch_id: int | None


async def create_adhoc(connection: AsyncConnection, values: dict[str, Any]) -> int:
    """A single rollout; idempotent by workflow id."""
    statement = pg_insert(Rollout).values(**values).on_conflict_do_nothing().returning(Rollout.id)
    created = (await connection.execute(statement)).scalar_one_or_none()
    if created is not None:
        return int(created)
    return int(
        (await connection.execute(select(Rollout.id).where(Rollout.workflow_id == values["workflow_id"]))).scalar_one()
    )


async def claim(connection: AsyncConnection, rollout_id: int, owner: str) -> Claimed:
    """Makes `owner` (a Temporal run id) the one whose stages may write.

    A rollout with an outcome is returned as it is. One that another workflow run owned (a reset in the UI) gets a new attempt and
    goes on from its stored patch, where it has one; its sessions are closed and the release of its boxes is wanted, since nobody else
    would end them as long as the new life runs. Claiming again with the same owner changes nothing.
    """
    row = (
        await connection.execute(select(Rollout).where(Rollout.id == rollout_id).with_for_update(key_share=True))
    ).one_or_none()
    if row is None:
        raise BugError(f"rollout {rollout_id} has no row")
    attempt = row.attempt
    if row.outcome is None and row.owner != owner:
        await connection.execute(
            update(Attempt)
            .where(Attempt.rollout_id == rollout_id, Attempt.state == AttemptState.OPEN)
            .values(state=AttemptState.SUPERSEDED)
        )
        if row.owner is not None:
            await close_sessions(connection, rollout_id)
            await sandboxes.want_release_of_rollout(connection, rollout_id, "taken over by another workflow run")
        attempt += 1
        await connection.execute(
            update(Rollout)
            .where(Rollout.id == rollout_id)
            .values(owner=owner, attempt=attempt, claimed_at=func.coalesce(Rollout.claimed_at, func.now()))
        )
    patch = select(Patch.id).where(Patch.rollout_id == rollout_id).order_by(Patch.attempt.desc()).limit(1)
    patch_id = (await connection.execute(patch)).scalar_one_or_none()
    return Claimed(row.run_id, row.group_id, row.task_id, row.outcome, row.reward, attempt, patch_id)


async def open_attempt(connection: AsyncConnection, rollout_id: int, n: int, owner: str) -> None:
    """The n-th attempt exists and all earlier ones are superseded. Raises FencedError if another workflow run owns the rollout."""
    statement = update(Rollout).where(
        Rollout.id == rollout_id, Rollout.owner == owner, Rollout.outcome.is_(None), Rollout.attempt <= n
    )
    if (await connection.execute(statement.values(attempt=n))).rowcount != 1:
        raise FencedError(f"rollout {rollout_id} belongs to another workflow run, has ended, or is past attempt {n}")
    await connection.execute(
        update(Attempt)
        .where(Attempt.rollout_id == rollout_id, Attempt.n < n, Attempt.state == AttemptState.OPEN)
        .values(state=AttemptState.SUPERSEDED)
    )
    await connection.execute(pg_insert(Attempt).values(rollout_id=rollout_id, n=n).on_conflict_do_nothing())


async def take_fence(connection: AsyncConnection, rollout_id: int, attempt: int) -> int:
    """The fence of this try of a stage: a later try takes a higher one, and this one's writes then match no row."""
    statement = (
        update(Attempt)
        .where(Attempt.rollout_id == rollout_id, Attempt.n == attempt, Attempt.state != AttemptState.SUPERSEDED)
        .values(fence=Attempt.fence + 1)
        .returning(Attempt.fence)
    )
    fence = (await connection.execute(statement)).scalar_one_or_none()
    if fence is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} has been superseded")
    return int(fence)


async def write_attempt(
    connection: AsyncConnection, rollout_id: int, attempt: int, fence: int, values: dict[str, Any]
) -> None:
    """Raises FencedError where a later try of a stage, or a later attempt, has taken over."""
    statement = update(Attempt).where(
        Attempt.rollout_id == rollout_id,
        Attempt.n == attempt,
        Attempt.fence == fence,
        Attempt.state != AttemptState.SUPERSEDED,
    )
    if (await connection.execute(statement.values(**values))).rowcount != 1:
        raise FencedError(f"a later try has taken over attempt {attempt} of rollout {rollout_id}")


async def get_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> Attempt:
    row = (
        await connection.execute(select(Attempt).where(Attempt.rollout_id == rollout_id, Attempt.n == attempt))
    ).one_or_none()
    if row is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} does not exist")
    return Attempt(**row._mapping)


async def store_patch(connection: AsyncConnection, values: dict[str, Any]) -> int:
    """Idempotent by attempt: the first stored patch of an attempt stays."""
    created = (
        await connection.execute(pg_insert(Patch).values(**values).on_conflict_do_nothing().returning(Patch.id))
    ).scalar_one_or_none()
    if created is not None:
        return int(created)
    statement = select(Patch.id).where(Patch.rollout_id == values["rollout_id"], Patch.attempt == values["attempt"])
    return int((await connection.execute(statement)).scalar_one())


async def get_patch(connection: AsyncConnection, patch_id: int) -> Patch:
    return Patch(**(await connection.execute(select(Patch).where(Patch.id == patch_id))).one()._mapping)


async def patch_of_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> Patch | None:
    row = (
        await connection.execute(select(Patch).where(Patch.rollout_id == rollout_id, Patch.attempt == attempt))
    ).one_or_none()
    return Patch(**row._mapping) if row else None


@dataclass(slots=True, frozen=True)
class Facts:
    """What a reward may depend on beside the verdict."""

    outcome: str | None
    reward: float | None
    group_id: int | None
    run_id: str
    attempt: int
    agent_exit: str | None
    purpose: str
    owner: str | None


async def lock(connection: AsyncConnection, rollout_id: int) -> Facts:
    """The rollout's row lock: the first statement of finalise. Turns may still refer to the row: one that is just being opened holds
    the session that finalise closes next (deadlock)."""
    row = (
        await connection.execute(select(Rollout).where(Rollout.id == rollout_id).with_for_update(key_share=True))
    ).one()
    statement = select(Attempt.agent_exit).where(Attempt.rollout_id == rollout_id).order_by(Attempt.n.desc()).limit(1)
    agent_exit = (await connection.execute(statement)).scalar_one_or_none()
    return Facts(row.outcome, row.reward, row.group_id, row.run_id, row.attempt, agent_exit, row.purpose, row.owner)


async def agent_exit_of(connection: AsyncConnection, rollout_id: int, attempt: int) -> str | None:
    statement = select(Attempt.agent_exit).where(Attempt.rollout_id == rollout_id, Attempt.n == attempt)
    return (await connection.execute(statement)).scalar_one_or_none()


async def close_sessions(connection: AsyncConnection, rollout_id: int) -> int:
    """Closes every session of the rollout and says how many were open; turns still in flight become `aborted`, so that no late answer
    slips in behind."""
    closing = update(Session).where(Session.rollout_id == rollout_id, Session.state == SessionState.OPEN)
    closed = await connection.execute(closing.values(state=SessionState.CLOSED, closed_at=func.now()))
    aborting = update(Turn).where(Turn.rollout_id == rollout_id, Turn.state == TurnState.IN_FLIGHT)
    await connection.execute(aborting.values(state=TurnState.ABORTED))
    return closed.rowcount


async def set_outcome(connection: AsyncConnection, rollout_id: int, values: dict[str, Any]) -> None:
    """Writes the outcome of a rollout whose lock is held and which has none, and applies its group's rule.

    A member that ends after its group left `open` is `late` and enters no statistics.
    """
    group_state = (
        select(RolloutGroup.state)
        .join(Rollout, and_(Rollout.group_id == RolloutGroup.id, Rollout.id == rollout_id))
        .with_for_update(of=RolloutGroup)
    )
    state = (await connection.execute(group_state)).scalar_one_or_none()
    late = state is not None and state != GroupState.OPEN
    statement = update(Rollout).where(Rollout.id == rollout_id, Rollout.outcome.is_(None)).returning(Rollout.group_id)
    group_id = (await connection.execute(statement.values(**values, late=late, ended_at=func.now()))).scalar_one()
    sealing = update(Attempt).where(Attempt.rollout_id == rollout_id, Attempt.state == AttemptState.OPEN)
    await connection.execute(sealing.values(state=AttemptState.SEALED))
    if group_id is not None and not late:
        await groups.settle(connection, group_id, accept_failed=False)


def ended(row: Facts) -> tuple[Outcome, float | None, AgentExit | None] | None:
    """The stored result of a rollout that has ended, None while it is open."""
    if row.outcome is None:
        return None
    return Outcome(row.outcome), row.reward, AgentExit(row.agent_exit) if row.agent_exit else None


async def temperature_of(connection: AsyncConnection, rollout_id: int) -> float:
    return float((await connection.execute(select(Rollout.temperature).where(Rollout.id == rollout_id))).scalar_one())


async def run_of(connection: AsyncConnection, rollout_id: int) -> str:
    return str((await connection.execute(select(Rollout.run_id).where(Rollout.id == rollout_id))).scalar_one())


async def is_open(connection: AsyncConnection, rollout_id: int) -> bool:
    return (await connection.execute(select(Rollout.outcome).where(Rollout.id == rollout_id))).scalar_one() is None


@dataclass(slots=True, frozen=True)
class ClaimedRollout:
    id: int
    workflow_id: str
    group_id: int | None
    owner: str | None


async def claimed_and_open(connection: AsyncConnection) -> list[ClaimedRollout]:
    """Rollouts that a workflow has claimed and that have no outcome."""
    columns = (Rollout.id, Rollout.workflow_id, Rollout.group_id, Rollout.owner)
    statement = select(*columns).where(Rollout.outcome.is_(None), Rollout.owner.is_not(None))
    return [ClaimedRollout(*row) for row in await connection.execute(statement.order_by(Rollout.id))]


async def paid_by(connection: AsyncConnection, rollout_id: int) -> int | None:
    """The grade that the rollout's reward came from."""
    found = (await connection.execute(select(Rollout.grade_id).where(Rollout.id == rollout_id))).scalar_one()
    return None if found is None else int(found)


async def pay_again(connection: AsyncConnection, rollout_id: int, values: dict[str, Any]) -> bool:
    """A new verdict's reward for a rollout that has ended; False where it was cancelled or replaced, or a step has used its group."""
    used = select(BatchItem.group_id).where(BatchItem.group_id == Rollout.group_id)
    planned = select(RolloutGroup.id).where(
        RolloutGroup.id == Rollout.group_id, RolloutGroup.state.in_(["consumed", "cancelled"])
    )
    statement = update(Rollout).where(
        Rollout.id == rollout_id,
        Rollout.outcome.is_not(None),
        Rollout.outcome != Outcome.CANCELLED,
        Rollout.replaced_by.is_(None),
        ~used.exists(),
        ~planned.exists(),
    )
    return bool((await connection.execute(statement.values(**values))).rowcount == 1)
