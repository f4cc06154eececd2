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
from ratchet.store.schema import (
    AttemptTable,
    BatchItemTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    SessionTable,
    TurnTable,
)
from ratchet.types import AgentExit, AttemptState, GroupState, Outcome, SessionState, TurnState


@dataclass(slots=True, frozen=True)
class ClaimedAttempt:
    run_id: str
    group_id: int | None
    task_id: int
    outcome: str | None
    reward: float | None
    attempt: int
    patch_id: int | None


async def create_adhoc_rollout(connection: AsyncConnection, values: dict[str, Any]) -> int:
    """A single rollout; idempotent by workflow id."""
    statement = pg_insert(RolloutTable).values(**values).on_conflict_do_nothing().returning(RolloutTable.id)
    created = (await connection.execute(statement)).scalar_one_or_none()
    if created is not None:
        return int(created)
    return int(
        (
            await connection.execute(select(RolloutTable.id).where(RolloutTable.workflow_id == values["workflow_id"]))
        ).scalar_one()
    )


async def claim_rollout(connection: AsyncConnection, rollout_id: int, owner: str) -> ClaimedAttempt:
    """Makes `owner` (a Temporal run id) the one whose stages may write.

    A rollout with an outcome is returned as it is. One that another workflow run owned (a reset in the UI) gets a new attempt and
    goes on from its stored patch, where it has one; its sessions are closed and the release of its boxes is wanted, since nobody else
    would end them as long as the new life runs. Claiming again with the same owner changes nothing.
    """
    row = (
        await connection.execute(
            select(RolloutTable).where(RolloutTable.id == rollout_id).with_for_update(key_share=True)
        )
    ).one_or_none()
    if row is None:
        raise BugError(f"rollout {rollout_id} has no row")
    attempt = row.attempt
    if row.outcome is None and row.owner != owner:
        await connection.execute(
            update(AttemptTable)
            .where(AttemptTable.rollout_id == rollout_id, AttemptTable.state == AttemptState.OPEN)
            .values(state=AttemptState.SUPERSEDED)
        )
        if row.owner is not None:
            await close_sessions(connection, rollout_id)
            await sandboxes.want_release_of_rollout(connection, rollout_id, "taken over by another workflow run")
        attempt += 1
        await connection.execute(
            update(RolloutTable)
            .where(RolloutTable.id == rollout_id)
            .values(owner=owner, attempt=attempt, claimed_at=func.coalesce(RolloutTable.claimed_at, func.now()))
        )
    patch = (
        select(PatchTable.id).where(PatchTable.rollout_id == rollout_id).order_by(PatchTable.attempt.desc()).limit(1)
    )
    patch_id = (await connection.execute(patch)).scalar_one_or_none()
    return ClaimedAttempt(row.run_id, row.group_id, row.task_id, row.outcome, row.reward, attempt, patch_id)


async def open_attempt(connection: AsyncConnection, rollout_id: int, n: int, owner: str) -> None:
    """The n-th attempt exists and all earlier ones are superseded. Raises FencedError if another workflow run owns the rollout."""
    statement = update(RolloutTable).where(
        RolloutTable.id == rollout_id,
        RolloutTable.owner == owner,
        RolloutTable.outcome.is_(None),
        RolloutTable.attempt <= n,
    )
    if (await connection.execute(statement.values(attempt=n))).rowcount != 1:
        raise FencedError(f"rollout {rollout_id} belongs to another workflow run, has ended, or is past attempt {n}")
    await connection.execute(
        update(AttemptTable)
        .where(AttemptTable.rollout_id == rollout_id, AttemptTable.n < n, AttemptTable.state == AttemptState.OPEN)
        .values(state=AttemptState.SUPERSEDED)
    )
    await connection.execute(pg_insert(AttemptTable).values(rollout_id=rollout_id, n=n).on_conflict_do_nothing())


async def take_fence(connection: AsyncConnection, rollout_id: int, attempt: int) -> int:
    """The fence of this try of a stage: a later try takes a higher one, and this one's writes then match no row."""
    statement = (
        update(AttemptTable)
        .where(
            AttemptTable.rollout_id == rollout_id,
            AttemptTable.n == attempt,
            AttemptTable.state != AttemptState.SUPERSEDED,
        )
        .values(fence=AttemptTable.fence + 1)
        .returning(AttemptTable.fence)
    )
    fence = (await connection.execute(statement)).scalar_one_or_none()
    if fence is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} has been superseded")
    return int(fence)


async def write_attempt(
    connection: AsyncConnection, rollout_id: int, attempt: int, fence: int, values: dict[str, Any]
) -> None:
    """Raises FencedError where a later try of a stage, or a later attempt, has taken over."""
    statement = update(AttemptTable).where(
        AttemptTable.rollout_id == rollout_id,
        AttemptTable.n == attempt,
        AttemptTable.fence == fence,
        AttemptTable.state != AttemptState.SUPERSEDED,
    )
    if (await connection.execute(statement.values(**values))).rowcount != 1:
        raise FencedError(f"a later try has taken over attempt {attempt} of rollout {rollout_id}")


async def get_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> AttemptTable:
    row = (
        await connection.execute(
            select(AttemptTable).where(AttemptTable.rollout_id == rollout_id, AttemptTable.n == attempt)
        )
    ).one_or_none()
    if row is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} does not exist")
    return AttemptTable(**row._mapping)


async def store_patch(connection: AsyncConnection, values: dict[str, Any]) -> int:
    """Idempotent by attempt: the first stored patch of an attempt stays."""
    created = (
        await connection.execute(
            pg_insert(PatchTable).values(**values).on_conflict_do_nothing().returning(PatchTable.id)
        )
    ).scalar_one_or_none()
    if created is not None:
        return int(created)
    statement = select(PatchTable.id).where(
        PatchTable.rollout_id == values["rollout_id"], PatchTable.attempt == values["attempt"]
    )
    return int((await connection.execute(statement)).scalar_one())


async def get_patch(connection: AsyncConnection, patch_id: int) -> PatchTable:
    return PatchTable(**(await connection.execute(select(PatchTable).where(PatchTable.id == patch_id))).one()._mapping)


async def patch_of_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> PatchTable | None:
    row = (
        await connection.execute(
            select(PatchTable).where(PatchTable.rollout_id == rollout_id, PatchTable.attempt == attempt)
        )
    ).one_or_none()
    return PatchTable(**row._mapping) if row else None


@dataclass(slots=True, frozen=True)
class RolloutFacts:
    """What a reward may depend on beside the verdict."""

    outcome: str | None
    reward: float | None
    group_id: int | None
    run_id: str
    attempt: int
    agent_exit: str | None
    purpose: str
    owner: str | None


async def lock_rollout(connection: AsyncConnection, rollout_id: int) -> RolloutFacts:
    """The rollout's row lock: the first statement of finalise. Turns may still refer to the row: one that is just being opened holds
    the session that finalise closes next (deadlock)."""
    row = (
        await connection.execute(
            select(RolloutTable).where(RolloutTable.id == rollout_id).with_for_update(key_share=True)
        )
    ).one()
    statement = (
        select(AttemptTable.agent_exit)
        .where(AttemptTable.rollout_id == rollout_id)
        .order_by(AttemptTable.n.desc())
        .limit(1)
    )
    agent_exit = (await connection.execute(statement)).scalar_one_or_none()
    return RolloutFacts(
        row.outcome, row.reward, row.group_id, row.run_id, row.attempt, agent_exit, row.purpose, row.owner
    )


async def agent_exit_of(connection: AsyncConnection, rollout_id: int, attempt: int) -> str | None:
    statement = select(AttemptTable.agent_exit).where(AttemptTable.rollout_id == rollout_id, AttemptTable.n == attempt)
    return (await connection.execute(statement)).scalar_one_or_none()


async def close_sessions(connection: AsyncConnection, rollout_id: int) -> int:
    """Closes every session of the rollout and says how many were open; turns still in flight become `aborted`, so that no late answer
    slips in behind."""
    closing = update(SessionTable).where(SessionTable.rollout_id == rollout_id, SessionTable.state == SessionState.OPEN)
    closed = await connection.execute(closing.values(state=SessionState.CLOSED, closed_at=func.now()))
    aborting = update(TurnTable).where(TurnTable.rollout_id == rollout_id, TurnTable.state == TurnState.IN_FLIGHT)
    await connection.execute(aborting.values(state=TurnState.ABORTED))
    return closed.rowcount


async def set_outcome(connection: AsyncConnection, rollout_id: int, values: dict[str, Any]) -> None:
    """Writes the outcome of a rollout whose lock is held and which has none, and applies its group's rule.

    A member that ends after its group left `open` is `late` and enters no statistics.
    """
    group_state = (
        select(RolloutGroupTable.state)
        .join(RolloutTable, and_(RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.id == rollout_id))
        .with_for_update(of=RolloutGroupTable)
    )
    state = (await connection.execute(group_state)).scalar_one_or_none()
    late = state is not None and state != GroupState.OPEN
    statement = (
        update(RolloutTable)
        .where(RolloutTable.id == rollout_id, RolloutTable.outcome.is_(None))
        .returning(RolloutTable.group_id)
    )
    group_id = (await connection.execute(statement.values(**values, late=late, ended_at=func.now()))).scalar_one()
    sealing = update(AttemptTable).where(AttemptTable.rollout_id == rollout_id, AttemptTable.state == AttemptState.OPEN)
    await connection.execute(sealing.values(state=AttemptState.SEALED))
    if group_id is not None and not late:
        await groups.settle_group(connection, group_id, accept_failed=False)


def ended_result(row: RolloutFacts) -> tuple[Outcome, float | None, AgentExit | None] | None:
    """The stored result of a rollout that has ended, None while it is open."""
    if row.outcome is None:
        return None
    return Outcome(row.outcome), row.reward, AgentExit(row.agent_exit) if row.agent_exit else None


async def temperature_of(connection: AsyncConnection, rollout_id: int) -> float:
    return float(
        (await connection.execute(select(RolloutTable.temperature).where(RolloutTable.id == rollout_id))).scalar_one()
    )


async def run_of_rollout(connection: AsyncConnection, rollout_id: int) -> str:
    return str(
        (await connection.execute(select(RolloutTable.run_id).where(RolloutTable.id == rollout_id))).scalar_one()
    )


async def is_rollout_open(connection: AsyncConnection, rollout_id: int) -> bool:
    return (
        await connection.execute(select(RolloutTable.outcome).where(RolloutTable.id == rollout_id))
    ).scalar_one() is None


@dataclass(slots=True, frozen=True)
class ClaimedRollout:
    id: int
    workflow_id: str
    group_id: int | None
    owner: str | None


async def claimed_and_open(connection: AsyncConnection) -> list[ClaimedRollout]:
    """Rollouts that a workflow has claimed and that have no outcome."""
    columns = (RolloutTable.id, RolloutTable.workflow_id, RolloutTable.group_id, RolloutTable.owner)
    statement = select(*columns).where(RolloutTable.outcome.is_(None), RolloutTable.owner.is_not(None))
    return [ClaimedRollout(*row) for row in await connection.execute(statement.order_by(RolloutTable.id))]


async def rewarding_grade(connection: AsyncConnection, rollout_id: int) -> int | None:
    """The grade that the rollout's reward came from."""
    found = (await connection.execute(select(RolloutTable.grade_id).where(RolloutTable.id == rollout_id))).scalar_one()
    return None if found is None else int(found)


async def update_reward(connection: AsyncConnection, rollout_id: int, values: dict[str, Any]) -> bool:
    """A new verdict's reward for a rollout that has ended; False where it was cancelled or replaced, or a step has used its group."""
    used = select(BatchItemTable.group_id).where(BatchItemTable.group_id == RolloutTable.group_id)
    planned = select(RolloutGroupTable.id).where(
        RolloutGroupTable.id == RolloutTable.group_id, RolloutGroupTable.state.in_(["consumed", "cancelled"])
    )
    statement = update(RolloutTable).where(
        RolloutTable.id == rollout_id,
        RolloutTable.outcome.is_not(None),
        RolloutTable.outcome != Outcome.CANCELLED,
        RolloutTable.replaced_by.is_(None),
        ~used.exists(),
        ~planned.exists(),
    )
    return bool((await connection.execute(statement.values(**values))).rowcount == 1)
