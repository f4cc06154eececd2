"""The ledger of boxes: a row before the box, one user per box, release recorded before the kill.

Why here: one file per aggregate; a box without a row, or with a row that says `mark_released`, may be killed by the sweep.
Called by: `activities/boot.py`, the stages that spend a box, and `activities/sweep.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import exists, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import BoxSpentError, SandboxGoneError
from ratchet.store.schema import InstallationTable, PatchTable, RolloutTable, SandboxTable
from ratchet.types import SandboxRole, SandboxState


@dataclass(slots=True, frozen=True)
class LedgerRow:
    id: int
    uuid: UUID
    provider: str
    provider_id: str | None
    role: str
    rollout_id: int | None
    attempt: int
    workflow_id: str
    state: str


_COLUMNS = (
    SandboxTable.id,
    SandboxTable.uuid,
    SandboxTable.provider,
    SandboxTable.provider_id,
    SandboxTable.role,
    SandboxTable.rollout_id,
    SandboxTable.attempt,
    SandboxTable.workflow_id,
    SandboxTable.state,
)
_HELD = (SandboxState.CREATING, SandboxState.LIVE, SandboxState.RELEASE_WANTED)


_ABOUT_TO_BE_GRADED = select(func.count()).where(
    RolloutTable.outcome.is_(None),
    exists().where(PatchTable.rollout_id == RolloutTable.id),
    ~exists().where(SandboxTable.rollout_id == RolloutTable.id, SandboxTable.state.in_(_HELD)),
)
"""Rollouts between their boxes: the agent's is gone, the grader's not yet there."""


async def installation_id(connection: AsyncConnection) -> UUID:
    await connection.execute(pg_insert(InstallationTable).values(singleton=True).on_conflict_do_nothing())
    return UUID(str((await connection.execute(select(InstallationTable.uuid))).scalar_one()))


async def unused_sandboxes(
    connection: AsyncConnection, rollout_id: int, attempt: int, role: SandboxRole, workflow_id: str
) -> LedgerRow | None:
    """The box of an earlier try of the same boot, which nobody has used: a retried boot adopts it."""
    statement = (
        select(*_COLUMNS)
        .where(
            SandboxTable.rollout_id == rollout_id,
            SandboxTable.attempt == attempt,
            SandboxTable.role == role,
            SandboxTable.workflow_id == workflow_id,
            SandboxTable.state.in_([SandboxState.CREATING, SandboxState.LIVE]),
            SandboxTable.used_by.is_(None),
        )
        .order_by(SandboxTable.id.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    return LedgerRow(*row) if row else None


async def reserve_sandbox(connection: AsyncConnection, values: dict[str, object], max_boxes: int) -> LedgerRow | None:
    """A new ledger row, or None when the provider's boxes are all taken.

    The room of an agent's box stays its rollout's until the verdict: a new agent is let in only where every patch that waits for its
    grading box would find room as well, and a tenth is kept for grading beside. So whoever is in gets through. The advisory lock
    orders the count and the insert of concurrent boots.
    """
    await connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext(:provider))"), {"provider": values["provider"]}
    )
    held = select(func.count()).where(SandboxTable.provider == values["provider"], SandboxTable.state.in_(_HELD))
    taken, allowed = (await connection.execute(held)).scalar_one(), max_boxes
    if values["role"] == SandboxRole.AGENT:
        taken += (await connection.execute(_ABOUT_TO_BE_GRADED)).scalar_one()
        allowed -= max(1, max_boxes // 10)
    if taken >= allowed:
        return None
    return LedgerRow(*(await connection.execute(insert(SandboxTable).values(**values).returning(*_COLUMNS))).one())


async def set_sandbox_live(connection: AsyncConnection, sandbox_id: int, provider_id: str) -> str | None:
    """Returns the provider id that the ledger holds now: the caller's own, another try's, or None if the box is unwanted by now."""
    statement = update(SandboxTable).where(
        SandboxTable.id == sandbox_id, SandboxTable.state == SandboxState.CREATING, SandboxTable.provider_id.is_(None)
    )
    result = await connection.execute(
        statement.values(provider_id=provider_id, state=SandboxState.LIVE, live_at=func.now())
    )
    if result.rowcount == 1:
        return provider_id
    row = (
        await connection.execute(
            select(SandboxTable.provider_id, SandboxTable.state).where(SandboxTable.id == sandbox_id)
        )
    ).one()
    return row.provider_id if row.state == SandboxState.LIVE else None


async def spend_sandbox(connection: AsyncConnection, sandbox_id: int, user: str) -> str:
    """Marks the box as used by this try and returns its provider id; a box is spent by its first use.

    Raises BoxSpentError where another try was here, SandboxGoneError where the box has been released.
    """
    statement = update(SandboxTable).where(
        SandboxTable.id == sandbox_id, SandboxTable.used_by.is_(None), SandboxTable.state == SandboxState.LIVE
    )
    provider_id = (
        await connection.execute(statement.values(used_by=user).returning(SandboxTable.provider_id))
    ).scalar_one_or_none()
    if provider_id is not None:
        return str(provider_id)
    row = (
        await connection.execute(select(SandboxTable.state, SandboxTable.used_by).where(SandboxTable.id == sandbox_id))
    ).one()
    if row.state != SandboxState.LIVE:
        raise SandboxGoneError(f"box {sandbox_id} is {row.state}")
    raise BoxSpentError(f"box {sandbox_id} was used by {row.used_by}")


async def sandboxes_of_user(connection: AsyncConnection, workflow_id: str, user: str) -> list[LedgerRow]:
    """Boxes that this user of this workflow still holds, now marked for release."""
    mine = (SandboxTable.workflow_id == workflow_id, SandboxTable.used_by == user, SandboxTable.state.in_(_HELD))
    await connection.execute(
        update(SandboxTable).where(*mine).values(state=SandboxState.RELEASE_WANTED, release_reason="tried again")
    )
    return [LedgerRow(*row) for row in await connection.execute(select(*_COLUMNS).where(*mine))]


async def provider_id(connection: AsyncConnection, sandbox_id: int) -> str:
    """Of a live box; raises SandboxGoneError otherwise."""
    row = (
        await connection.execute(
            select(SandboxTable.provider_id, SandboxTable.state).where(SandboxTable.id == sandbox_id)
        )
    ).one()
    if row.state != SandboxState.LIVE or row.provider_id is None:
        raise SandboxGoneError(f"box {sandbox_id} is {row.state}")
    return str(row.provider_id)


async def want_sandbox_release(connection: AsyncConnection, sandbox_id: int, reason: str) -> None:
    """In the transaction that stores what the box was for; the kill follows and may be repeated."""
    statement = update(SandboxTable).where(
        SandboxTable.id == sandbox_id, SandboxTable.state.in_([SandboxState.CREATING, SandboxState.LIVE])
    )
    await connection.execute(statement.values(state=SandboxState.RELEASE_WANTED, release_reason=reason))


async def want_release_of_rollout(connection: AsyncConnection, rollout_id: int, reason: str) -> list[LedgerRow]:
    """Every box of the rollout that is not released yet, now marked."""
    marking = update(SandboxTable).where(
        SandboxTable.rollout_id == rollout_id, SandboxTable.state.in_([SandboxState.CREATING, SandboxState.LIVE])
    )
    await connection.execute(marking.values(state=SandboxState.RELEASE_WANTED, release_reason=reason))
    statement = select(*_COLUMNS).where(
        SandboxTable.rollout_id == rollout_id, SandboxTable.state == SandboxState.RELEASE_WANTED
    )
    return [LedgerRow(*row) for row in await connection.execute(statement)]


async def mark_released(connection: AsyncConnection, sandbox_ids: Sequence[int]) -> None:
    statement = update(SandboxTable).where(
        SandboxTable.id.in_(list(sandbox_ids)), SandboxTable.state != SandboxState.RELEASED
    )
    await connection.execute(statement.values(state=SandboxState.RELEASED, released_at=func.now()))


async def list_unreleased(connection: AsyncConnection, provider: str) -> list[LedgerRow]:
    statement = select(*_COLUMNS).where(SandboxTable.provider == provider, SandboxTable.state.in_(_HELD))
    return [LedgerRow(*row) for row in await connection.execute(statement.order_by(SandboxTable.id))]


async def stale_creating_ids(connection: AsyncConnection, provider: str, grace_seconds: float) -> set[int]:
    """Rows that stayed in `creating` longer than the grace: their create call must be over."""
    statement = select(SandboxTable.id).where(
        SandboxTable.provider == provider,
        SandboxTable.state == SandboxState.CREATING,
        SandboxTable.created_at < func.now() - func.make_interval(0, 0, 0, 0, 0, 0, grace_seconds),
    )
    return set((await connection.execute(statement)).scalars())


async def list_sandboxes(connection: AsyncConnection, every: bool) -> list[dict[str, Any]]:
    """The ledger for people, newest first; without `every` only what is held."""
    age = func.extract("epoch", func.coalesce(SandboxTable.released_at, func.now()) - SandboxTable.created_at).label(
        "age_seconds"
    )
    columns = (
        *_COLUMNS,
        SandboxTable.image,
        SandboxTable.used_by,
        SandboxTable.release_reason,
        SandboxTable.created_at,
        age,
    )
    statement = select(*columns).order_by(SandboxTable.id.desc())
    rows = await connection.execute(statement if every else statement.where(SandboxTable.state.in_(_HELD)))
    return [{**row._mapping, "age_seconds": round(float(row.age_seconds))} for row in rows]
