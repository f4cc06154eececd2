"""The ledger of boxes: a row before the box, one user per box, release recorded before the kill.

Why here: one file per aggregate; a box without a row, or with a row that says `released`, may be killed by the sweep.
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
from ratchet.store.schema import Installation, Patch, Rollout, Sandbox
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
    Sandbox.id,
    Sandbox.uuid,
    Sandbox.provider,
    Sandbox.provider_id,
    Sandbox.role,
    Sandbox.rollout_id,
    Sandbox.attempt,
    Sandbox.workflow_id,
    Sandbox.state,
)
_HELD = (SandboxState.CREATING, SandboxState.LIVE, SandboxState.RELEASE_WANTED)


_ABOUT_TO_BE_GRADED = select(func.count()).where(
    Rollout.outcome.is_(None),
    exists().where(Patch.rollout_id == Rollout.id),
    ~exists().where(Sandbox.rollout_id == Rollout.id, Sandbox.state.in_(_HELD)),
)
"""Rollouts between their boxes: the agent's is gone, the grader's not yet there."""


async def installation(connection: AsyncConnection) -> UUID:
    await connection.execute(pg_insert(Installation).values(singleton=True).on_conflict_do_nothing())
    return UUID(str((await connection.execute(select(Installation.uuid))).scalar_one()))


async def unused(
    connection: AsyncConnection, rollout_id: int, attempt: int, role: SandboxRole, workflow_id: str
) -> LedgerRow | None:
    """The box of an earlier try of the same boot, which nobody has used: a retried boot adopts it."""
    statement = (
        select(*_COLUMNS)
        .where(
            Sandbox.rollout_id == rollout_id,
            Sandbox.attempt == attempt,
            Sandbox.role == role,
            Sandbox.workflow_id == workflow_id,
            Sandbox.state.in_([SandboxState.CREATING, SandboxState.LIVE]),
            Sandbox.used_by.is_(None),
        )
        .order_by(Sandbox.id.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    return LedgerRow(*row) if row else None


async def reserve(connection: AsyncConnection, values: dict[str, object], max_boxes: int) -> LedgerRow | None:
    """A new ledger row, or None when the provider's boxes are all taken.

    The room of an agent's box stays its rollout's until the verdict: a new agent is let in only where every patch that waits for its
    grading box would find room as well, and a tenth is kept for grading beside. So whoever is in gets through. The advisory lock
    orders the count and the insert of concurrent boots.
    """
    await connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext(:provider))"), {"provider": values["provider"]}
    )
    held = select(func.count()).where(Sandbox.provider == values["provider"], Sandbox.state.in_(_HELD))
    taken, allowed = (await connection.execute(held)).scalar_one(), max_boxes
    if values["role"] == SandboxRole.AGENT:
        taken += (await connection.execute(_ABOUT_TO_BE_GRADED)).scalar_one()
        allowed -= max(1, max_boxes // 10)
    if taken >= allowed:
        return None
    return LedgerRow(*(await connection.execute(insert(Sandbox).values(**values).returning(*_COLUMNS))).one())


async def set_live(connection: AsyncConnection, sandbox_id: int, provider_id: str) -> str | None:
    """Returns the provider id that the ledger holds now: the caller's own, another try's, or None if the box is unwanted by now."""
    statement = update(Sandbox).where(
        Sandbox.id == sandbox_id, Sandbox.state == SandboxState.CREATING, Sandbox.provider_id.is_(None)
    )
    result = await connection.execute(
        statement.values(provider_id=provider_id, state=SandboxState.LIVE, live_at=func.now())
    )
    if result.rowcount == 1:
        return provider_id
    row = (await connection.execute(select(Sandbox.provider_id, Sandbox.state).where(Sandbox.id == sandbox_id))).one()
    return row.provider_id if row.state == SandboxState.LIVE else None


async def spend(connection: AsyncConnection, sandbox_id: int, user: str) -> str:
    """Marks the box as used by this try and returns its provider id; a box is spent by its first use.

    Raises BoxSpentError where another try was here, SandboxGoneError where the box has been released.
    """
    statement = update(Sandbox).where(
        Sandbox.id == sandbox_id, Sandbox.used_by.is_(None), Sandbox.state == SandboxState.LIVE
    )
    provider_id = (
        await connection.execute(statement.values(used_by=user).returning(Sandbox.provider_id))
    ).scalar_one_or_none()
    if provider_id is not None:
        return str(provider_id)
    row = (await connection.execute(select(Sandbox.state, Sandbox.used_by).where(Sandbox.id == sandbox_id))).one()
    if row.state != SandboxState.LIVE:
        raise SandboxGoneError(f"box {sandbox_id} is {row.state}")
    raise BoxSpentError(f"box {sandbox_id} was used by {row.used_by}")


async def of_user(connection: AsyncConnection, workflow_id: str, user: str) -> list[LedgerRow]:
    """Boxes that this user of this workflow still holds, now marked for release."""
    mine = (Sandbox.workflow_id == workflow_id, Sandbox.used_by == user, Sandbox.state.in_(_HELD))
    await connection.execute(
        update(Sandbox).where(*mine).values(state=SandboxState.RELEASE_WANTED, release_reason="tried again")
    )
    return [LedgerRow(*row) for row in await connection.execute(select(*_COLUMNS).where(*mine))]


async def provider_id(connection: AsyncConnection, sandbox_id: int) -> str:
    """Of a live box; raises SandboxGoneError otherwise."""
    row = (await connection.execute(select(Sandbox.provider_id, Sandbox.state).where(Sandbox.id == sandbox_id))).one()
    if row.state != SandboxState.LIVE or row.provider_id is None:
        raise SandboxGoneError(f"box {sandbox_id} is {row.state}")
    return str(row.provider_id)


async def want_release(connection: AsyncConnection, sandbox_id: int, reason: str) -> None:
    """In the transaction that stores what the box was for; the kill follows and may be repeated."""
    statement = update(Sandbox).where(
        Sandbox.id == sandbox_id, Sandbox.state.in_([SandboxState.CREATING, SandboxState.LIVE])
    )
    await connection.execute(statement.values(state=SandboxState.RELEASE_WANTED, release_reason=reason))


async def want_release_of_rollout(connection: AsyncConnection, rollout_id: int, reason: str) -> list[LedgerRow]:
    """Every box of the rollout that is not released yet, now marked."""
    marking = update(Sandbox).where(
        Sandbox.rollout_id == rollout_id, Sandbox.state.in_([SandboxState.CREATING, SandboxState.LIVE])
    )
    await connection.execute(marking.values(state=SandboxState.RELEASE_WANTED, release_reason=reason))
    statement = select(*_COLUMNS).where(Sandbox.rollout_id == rollout_id, Sandbox.state == SandboxState.RELEASE_WANTED)
    return [LedgerRow(*row) for row in await connection.execute(statement)]


async def released(connection: AsyncConnection, sandbox_ids: Sequence[int]) -> None:
    statement = update(Sandbox).where(Sandbox.id.in_(list(sandbox_ids)), Sandbox.state != SandboxState.RELEASED)
    await connection.execute(statement.values(state=SandboxState.RELEASED, released_at=func.now()))


async def not_released(connection: AsyncConnection, provider: str) -> list[LedgerRow]:
    statement = select(*_COLUMNS).where(Sandbox.provider == provider, Sandbox.state.in_(_HELD))
    return [LedgerRow(*row) for row in await connection.execute(statement.order_by(Sandbox.id))]


async def old_creating(connection: AsyncConnection, provider: str, grace_seconds: float) -> set[int]:
    """Rows that stayed in `creating` longer than the grace: their create call must be over."""
    statement = select(Sandbox.id).where(
        Sandbox.provider == provider,
        Sandbox.state == SandboxState.CREATING,
        Sandbox.created_at < func.now() - func.make_interval(0, 0, 0, 0, 0, 0, grace_seconds),
    )
    return set((await connection.execute(statement)).scalars())


async def list_boxes(connection: AsyncConnection, every: bool) -> list[dict[str, Any]]:
    """The ledger for people, newest first; without `every` only what is held."""
    age = func.extract("epoch", func.coalesce(Sandbox.released_at, func.now()) - Sandbox.created_at).label(
        "age_seconds"
    )
    columns = (*_COLUMNS, Sandbox.image, Sandbox.used_by, Sandbox.release_reason, Sandbox.created_at, age)
    statement = select(*columns).order_by(Sandbox.id.desc())
    rows = await connection.execute(statement if every else statement.where(Sandbox.state.in_(_HELD)))
    return [{**row._mapping, "age_seconds": round(float(row.age_seconds))} for row in rows]
