"""The ledger of boxes: the row is written before the box exists, and rollouts record its release before the kill.

A crash at any point leaves a row that the sweep can act on; a box without a row, or with a released one, may be killed.
The states and their transitions are listed at `ratchet.types.SandboxState`.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import BigInteger, Text, bindparam, exists, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import BoxSpentError, FencedError, SandboxGoneError
from ratchet.types import JsonObject, SandboxRole, SandboxState
from store.columns import columns_of, count_rows, seconds_of
from store.schema import PatchTable, RolloutTable, SandboxTable


@dataclass(slots=True, frozen=True)
class LedgerRow:
    """A row of the ledger; `SandboxTable` describes the columns."""

    id: int
    uuid: UUID
    provider: str
    provider_id: str | None
    role: str
    rollout_id: int | None
    attempt: int
    workflow_id: str
    state: str


@dataclass(slots=True, frozen=True)
class NewSandbox:
    """A ledger row to be inserted. `rollout_id` None: a box of an admission. `used_by`: spent from the start."""

    provider: str
    role: SandboxRole
    rollout_id: int | None
    attempt: int
    workflow_id: str
    image: str
    used_by: str | None = None


_COLUMNS = columns_of(LedgerRow, SandboxTable)
_WANTED = (SandboxState.CREATING, SandboxState.LIVE)
_HELD = (*_WANTED, SandboxState.RELEASE_WANTED)


_ABOUT_TO_BE_GRADED = select(func.count()).where(
    RolloutTable.outcome.is_(None),
    exists().where(PatchTable.rollout_id == RolloutTable.id),
    ~exists().where(SandboxTable.rollout_id == RolloutTable.id, SandboxTable.state.in_(_HELD)),
)
"""Number of rollouts between their boxes: the agent's box is released and the grading box not yet requested."""


# The statements of every boot are built once: building one takes longer than running it.
_ROLLOUT, _WORKFLOW = bindparam("rollout_id", type_=BigInteger()), bindparam("workflow_id", type_=Text())
_UNUSED = (
    select(*_COLUMNS)
    .where(
        SandboxTable.rollout_id == _ROLLOUT,
        SandboxTable.attempt == bindparam("attempt"),
        SandboxTable.role == bindparam("role"),
        SandboxTable.workflow_id == _WORKFLOW,
        SandboxTable.state.in_(_WANTED),
        SandboxTable.used_by.is_(None),
    )
    .order_by(SandboxTable.id.desc())
    .limit(1)
)
_HAS_USED_GRADING_BOX = select(
    exists().where(
        SandboxTable.rollout_id == _ROLLOUT,
        SandboxTable.workflow_id == _WORKFLOW,
        SandboxTable.role == SandboxRole.GRADE,
        SandboxTable.used_by.is_not(None),
    )
    & exists().where(RolloutTable.id == _ROLLOUT, RolloutTable.workflow_id == _WORKFLOW)
)
_RESERVED = insert(SandboxTable).returning(*_COLUMNS)
_BOOTING = (SandboxTable.state == SandboxState.CREATING) & SandboxTable.boot_error.is_(None)
_HELD_AND_BOOTING = select(func.count(), func.count().filter(_BOOTING)).where(
    SandboxTable.provider == bindparam("provider"), SandboxTable.state.in_(_HELD)
)


async def unused_sandbox(
    connection: AsyncConnection, rollout_id: int, attempt: int, role: SandboxRole, workflow_id: str
) -> LedgerRow | None:
    """Return the unused box of an earlier try of the same boot, which a retried boot adopts; None without one."""
    boot = {"rollout_id": rollout_id, "attempt": attempt, "role": role, "workflow_id": workflow_id}
    row = (await connection.execute(_UNUSED, boot)).one_or_none()
    return None if row is None else LedgerRow(*row)


async def has_used_grading_box(connection: AsyncConnection, rollout_id: int, workflow_id: str) -> bool:
    """Return whether the rollout's own workflow has used a grading box for it; a regrade's boxes do not count."""
    own = {"rollout_id": rollout_id, "workflow_id": workflow_id}
    return bool((await connection.execute(_HAS_USED_GRADING_BOX, own)).scalar_one())


async def reserve_sandbox(
    connection: AsyncConnection, new: NewSandbox, max_boxes: int, max_boots: int
) -> LedgerRow | None:
    """Insert a ledger row, or return None if `max_boxes` boxes of the provider are in use or `max_boots` are booting.

    A rollout keeps its place from the agent's box to the verdict: an agent's box is granted only if every rollout that
    waits for its grading box could get one, too, and a tenth of the boxes is reserved for grading. Agents' and grading
    boxes share the limit of boots; a boot whose newest try failed does not count. An advisory lock serialises the boots
    that find room; those that find none do not wait for it.
    """
    if not await _has_room(connection, new, max_boxes, max_boots):
        return None
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:provider))"), {"provider": new.provider})
    if not await _has_room(connection, new, max_boxes, max_boots):
        return None
    return LedgerRow(*(await connection.execute(_RESERVED, asdict(new))).one())


def places_of_agents(max_boxes: int) -> int:
    """Return how many of the boxes agents may have; the others are reserved for grading."""
    return max_boxes - max(1, max_boxes // 10)


async def count_places(connection: AsyncConnection, provider: str) -> int:
    """Return how many boxes are in use, and places of rollouts between their agent's and their grading box."""
    taken = await count_rows(connection, SandboxTable.provider == provider, SandboxTable.state.in_(_HELD))
    return int(taken + (await connection.execute(_ABOUT_TO_BE_GRADED)).scalar_one())


class BoxHolder(NamedTuple):
    """The number of boxes that a run holds; `run_id` is None for boxes that no rollout has."""

    run_id: str | None
    num_boxes: int


async def box_holders(connection: AsyncConnection, provider: str) -> list[BoxHolder]:
    """Return the runs that hold boxes of the provider, the largest first."""
    number = func.count()
    statement = (
        select(RolloutTable.run_id, number)
        .select_from(SandboxTable)
        .outerjoin(RolloutTable, RolloutTable.id == SandboxTable.rollout_id)
        .where(SandboxTable.provider == provider, SandboxTable.state.in_(_HELD))
        .group_by(RolloutTable.run_id)
        .order_by(number.desc())
        .limit(3)
    )
    return [BoxHolder(*row) for row in await connection.execute(statement)]


async def _has_room(connection: AsyncConnection, new: NewSandbox, max_boxes: int, max_boots: int) -> bool:
    taken, num_booting = (await connection.execute(_HELD_AND_BOOTING, {"provider": new.provider})).one()
    if new.role is not SandboxRole.AGENT:
        return bool(num_booting < max_boots and taken < max_boxes)
    allowed = places_of_agents(max_boxes)
    if num_booting >= max_boots or taken >= allowed:
        return False  # without the second count, which takes longer
    return bool(taken + (await connection.execute(_ABOUT_TO_BE_GRADED)).scalar_one() < allowed)


async def set_sandbox_live(connection: AsyncConnection, sandbox_id: int, provider_id: str) -> str | None:
    """Store a new box's provider id; return what the ledger holds: this or another try's, or None if unwanted."""
    statement = update(SandboxTable).where(
        SandboxTable.id == sandbox_id, SandboxTable.state == SandboxState.CREATING, SandboxTable.provider_id.is_(None)
    )
    result = await connection.execute(
        statement.values(provider_id=provider_id, state=SandboxState.LIVE, live_at=func.now(), boot_error=None)
    )
    if result.rowcount == 1:
        return provider_id
    known = select(SandboxTable.provider_id, SandboxTable.state).where(SandboxTable.id == sandbox_id)
    row = (await connection.execute(known)).one()
    return row.provider_id if row.state == SandboxState.LIVE else None


async def set_boot_error(connection: AsyncConnection, sandbox_id: int, error: str) -> None:
    """Record why a try to create the box failed; empty if the service had no room."""
    statement = update(SandboxTable).where(SandboxTable.id == sandbox_id, SandboxTable.state == SandboxState.CREATING)
    await connection.execute(statement.values(boot_error=error))


@dataclass(slots=True, frozen=True)
class BoxOwner:
    """The rollout that a box is for, and the workflow that has requested it."""

    rollout_id: int
    workflow_id: str


async def spend_sandbox(connection: AsyncConnection, sandbox_id: int, owner: BoxOwner, user: str) -> str:
    """Mark the box as used by this try; return its provider id. Raises BoxSpentError, or as `live_provider_id`."""
    found = await live_provider_id(connection, sandbox_id, owner)
    statement = update(SandboxTable).where(
        SandboxTable.id == sandbox_id, SandboxTable.used_by.is_(None), SandboxTable.state == SandboxState.LIVE
    )
    if (await connection.execute(statement.values(used_by=user))).rowcount != 1:
        raise BoxSpentError(f"box {sandbox_id} was used by another try")
    return found


async def sandboxes_of_user(connection: AsyncConnection, workflow_id: str, user: str) -> list[LedgerRow]:
    """Mark the boxes of this user of this workflow for release, and return them."""
    mine = (SandboxTable.workflow_id == workflow_id, SandboxTable.used_by == user, SandboxTable.state.in_(_HELD))
    await connection.execute(update(SandboxTable).where(*mine).values(_given_up("tried again")))
    return [LedgerRow(*row) for row in await connection.execute(select(*_COLUMNS).where(*mine))]


async def live_provider_id(connection: AsyncConnection, sandbox_id: int, owner: BoxOwner) -> str:
    """Return the live box's provider id. Raises SandboxGoneError if not live, FencedError for another owner's."""
    row = (await connection.execute(select(SandboxTable).where(SandboxTable.id == sandbox_id))).one()
    if (row.rollout_id, row.workflow_id) != (owner.rollout_id, owner.workflow_id):
        raise FencedError(f"box {sandbox_id} is not of {owner.workflow_id}, but of {row.workflow_id}")
    if row.state != SandboxState.LIVE or row.provider_id is None:
        raise SandboxGoneError(f"box {sandbox_id} is {row.state}")
    return str(row.provider_id)


async def want_sandbox_release(connection: AsyncConnection, sandbox_id: int, reason: str) -> None:
    """Mark the box for release in the transaction of its result; the kill follows and may be repeated."""
    statement = update(SandboxTable).where(SandboxTable.id == sandbox_id, SandboxTable.state.in_(_WANTED))
    await connection.execute(statement.values(_given_up(reason)))


async def want_release_of_rollout(connection: AsyncConnection, rollout_id: int, reason: str) -> list[LedgerRow]:
    """Mark every box of the rollout for release, and return those that are not released yet."""
    mine = SandboxTable.rollout_id == rollout_id
    marking = update(SandboxTable).where(mine, SandboxTable.state.in_(_WANTED))
    await connection.execute(marking.values(_given_up(reason)))
    statement = select(*_COLUMNS).where(mine, SandboxTable.state == SandboxState.RELEASE_WANTED)
    return [LedgerRow(*row) for row in await connection.execute(statement)]


def _given_up(reason: str) -> dict[str, Any]:
    """Return the columns of a box that is unused from now on: until it is killed it costs the rollout no time."""
    since = func.coalesce(SandboxTable.released_at, func.now())
    return {"state": SandboxState.RELEASE_WANTED, "release_reason": reason, "released_at": since}


async def mark_released(connection: AsyncConnection, sandbox_id: int, left_to: str = "") -> None:
    """Record that the box is killed, or is not this installation's: `left_to` says whose it is."""
    statement = update(SandboxTable).where(SandboxTable.id == sandbox_id, SandboxTable.state != SandboxState.RELEASED)
    reason = {"release_reason": left_to} if left_to else {}
    since = func.coalesce(SandboxTable.released_at, func.now())
    await connection.execute(statement.values(state=SandboxState.RELEASED, released_at=since, **reason))


async def box_mark(connection: AsyncConnection, sandbox_id: int) -> UUID:
    """Return the row's uuid, which its box carries."""
    found = await connection.execute(select(SandboxTable.uuid).where(SandboxTable.id == sandbox_id))
    return UUID(str(found.scalar_one()))


async def list_unreleased(connection: AsyncConnection, provider: str) -> list[LedgerRow]:
    """Return the provider's rows that are not released, oldest first."""
    statement = select(*_COLUMNS).where(SandboxTable.provider == provider, SandboxTable.state.in_(_HELD))
    return [LedgerRow(*row) for row in await connection.execute(statement.order_by(SandboxTable.id))]


async def stale_creating_ids(connection: AsyncConnection, provider: str, grace_seconds: float) -> set[int]:
    """Return the rows that have been `creating` for longer than the grace; their create call must have ended."""
    statement = select(SandboxTable.id).where(
        SandboxTable.provider == provider,
        SandboxTable.state == SandboxState.CREATING,
        SandboxTable.created_at < func.now() - func.make_interval(0, 0, 0, 0, 0, 0, grace_seconds),
    )
    return set((await connection.execute(statement)).scalars())


async def list_sandboxes(connection: AsyncConnection, every: bool) -> list[JsonObject]:
    """Return the ledger for a report, newest first; without `every` only rows that are not released."""
    age = seconds_of(func.coalesce(SandboxTable.released_at, func.now()) - SandboxTable.created_at)
    about = (SandboxTable.image, SandboxTable.used_by, SandboxTable.release_reason, SandboxTable.created_at)
    columns = (*_COLUMNS, *about, age.label("age_seconds"))
    statement = select(*columns).order_by(SandboxTable.id.desc())
    rows = await connection.execute(statement if every else statement.where(SandboxTable.state.in_(_HELD)))
    return [{**row._mapping, "age_seconds": round(row.age_seconds)} for row in rows]
