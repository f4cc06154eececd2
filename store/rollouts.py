"""Rollouts and their attempts: ownership, fences, patches and the transaction that ends a rollout.

Every state change carries the expected old state in its WHERE clause, so that a stale or repeated try changes nothing.
The states and their transitions are listed at `ratchet.types.AttemptState` and `ratchet.types.Outcome`.
"""

from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from sqlalchemy import and_, bindparam, func, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError, FencedError
from ratchet.types import AttemptState, GroupState, Outcome, Purpose, SessionState, TurnState
from store import groups, sandboxes
from store.columns import columns_of, read_one
from store.schema import AttemptTable, PatchTable, RolloutGroupTable, RolloutTable, SessionTable, TurnTable


@dataclass(slots=True, frozen=True)
class ClaimedAttempt:
    """A rollout after `claim_rollout`. `patch_id`: its newest stored patch, None without one."""

    run_id: str
    group_id: int | None
    task_id: int
    outcome: str | None
    reward: float | None
    attempt: int
    patch_id: int | None


@dataclass(slots=True, frozen=True)
class AdhocRollout:
    """The row of a rollout without a group; `RolloutTable` describes the columns."""

    run_id: str
    task_id: int
    member: int
    purpose: Purpose
    workflow_id: str
    harness: str
    temperature: float
    policy_version: str | None


@dataclass(slots=True, frozen=True)
class NewPatch:
    """An agent's diff, zstd. `reason`: why it was left out; empty if it was not."""

    rollout_id: int
    attempt: int
    base_commit: str
    diff: bytes
    num_bytes: int
    num_files: int
    reason: str = ""


class AttemptValues(TypedDict, total=False):
    """Columns of `AttemptTable` that stages write."""

    agent_exit: str
    used_seconds: float
    harness_version: str
    base_commit: str
    sandbox_id: int
    workspace_log: bytes
    transcript: bytes


class OutcomeValues(TypedDict, total=False):
    """Columns of `RolloutTable` that are written when a rollout ends or is regraded."""

    outcome: Outcome
    outcome_reason: str
    reward: float
    reward_components: dict[str, float]
    grade_id: int
    agent_exit: str | None
    timings: dict[str, float]
    num_turns: int
    num_chains: int
    num_trained_tokens: int


async def create_adhoc_rollout(connection: AsyncConnection, new: AdhocRollout) -> int:
    """Insert a rollout without group; return its id, also if repeated. Raises ConfigError if the id is taken."""
    statement = pg_insert(RolloutTable).values(**asdict(new)).on_conflict_do_nothing().returning(RolloutTable.id)
    created = (await connection.execute(statement)).scalar_one_or_none()
    if created is not None:
        return int(created)
    known = (await connection.execute(select(RolloutTable).where(RolloutTable.workflow_id == new.workflow_id))).one()
    if (known.run_id, known.task_id) != (new.run_id, new.task_id):
        raise ConfigError(
            f"{new.workflow_id} is the workflow id of rollout {known.id}, which is of another task or config; start "
            "this one under another id"
        )
    return int(known.id)


async def claim_rollout(connection: AsyncConnection, rollout_id: int, workflow_id: str, owner: str) -> ClaimedAttempt:
    """Make `owner`, a run id of Temporal of the workflow, the only workflow run whose stages may write.

    A rollout with an outcome is returned unchanged. If another workflow run owned it, for example before a reset in the
    UI, it gets a new attempt and continues from its stored patch if it has one; its sessions are closed and its boxes
    marked for release, because the sweep spares the boxes of a running workflow. A repeated claim by the same owner
    changes nothing. Raises FencedError if the workflow has no rollout of this id.
    """
    mine = select(RolloutTable).where(RolloutTable.id == rollout_id, RolloutTable.workflow_id == workflow_id)
    row = (await connection.execute(mine.with_for_update(key_share=True))).one_or_none()
    if row is None:
        raise FencedError(f"{workflow_id} has no rollout {rollout_id}")
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
    """Create the n-th attempt and supersede all earlier ones. Raises FencedError for another owner's rollout."""
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


_FENCE = (  # built once: building a statement takes longer than running it
    update(AttemptTable)
    .where(
        AttemptTable.rollout_id == bindparam("of_rollout"),
        AttemptTable.n == bindparam("attempt"),
        AttemptTable.state != AttemptState.SUPERSEDED,
    )
    .values(fence=AttemptTable.fence + 1)
    .returning(AttemptTable.fence)
)


async def take_fence(connection: AsyncConnection, rollout_id: int, attempt: int) -> int:
    """Return a fence for this try; older ones match no row now. Raises FencedError if the attempt is superseded."""
    of_try = {"of_rollout": rollout_id, "attempt": attempt}
    fence = (await connection.execute(_FENCE, of_try)).scalar_one_or_none()
    if fence is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} has been superseded")
    return int(fence)


async def write_attempt(
    connection: AsyncConnection, rollout_id: int, attempt: int, fence: int, values: AttemptValues
) -> None:
    """Update the attempt's row. Raises FencedError if a later try of a stage, or a later attempt, has taken over."""
    statement = update(AttemptTable).where(
        AttemptTable.rollout_id == rollout_id,
        AttemptTable.n == attempt,
        AttemptTable.fence == fence,
        AttemptTable.state != AttemptState.SUPERSEDED,
    )
    if (await connection.execute(statement.values(**values))).rowcount != 1:
        raise FencedError(f"a later try has taken over attempt {attempt} of rollout {rollout_id}")


async def get_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> AttemptTable:
    """Return the attempt's row. Raises FencedError if there is none."""
    statement = select(AttemptTable).where(AttemptTable.rollout_id == rollout_id, AttemptTable.n == attempt)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} does not exist")
    return AttemptTable(**row._mapping)


async def store_patch(connection: AsyncConnection, patch: NewPatch) -> int:
    """Insert the patch of an attempt and return its id; if the attempt has one already, return that one's id."""
    new = pg_insert(PatchTable).values(**asdict(patch)).on_conflict_do_nothing().returning(PatchTable.id)
    created = (await connection.execute(new)).scalar_one_or_none()
    if created is not None:
        return int(created)
    statement = select(PatchTable.id).where(
        PatchTable.rollout_id == patch.rollout_id, PatchTable.attempt == patch.attempt
    )
    return int((await connection.execute(statement)).scalar_one())


async def get_patch(connection: AsyncConnection, patch_id: int, rollout_id: int) -> PatchTable:
    """Return a patch of the rollout. Raises FencedError if the rollout has none of this id."""
    statement = select(PatchTable).where(PatchTable.id == patch_id, PatchTable.rollout_id == rollout_id)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise FencedError(f"rollout {rollout_id} has no patch {patch_id}")
    return PatchTable(**row._mapping)


async def patch_of_attempt(connection: AsyncConnection, rollout_id: int, attempt: int) -> PatchTable | None:
    statement = select(PatchTable).where(PatchTable.rollout_id == rollout_id, PatchTable.attempt == attempt)
    return await read_one(connection, PatchTable, statement)


@dataclass(slots=True, frozen=True)
class RolloutFacts:
    """The rollout's row under its lock. `agent_exit`: of its newest attempt. `grade_id`: that decided the reward."""

    outcome: str | None
    reward: float | None
    group_id: int | None
    run_id: str
    attempt: int
    agent_exit: str | None
    purpose: str
    owner: str | None
    workflow_id: str
    grade_id: int | None


async def lock_rollout(connection: AsyncConnection, rollout_id: int) -> RolloutFacts:
    """Lock the rollout's row and return it; the first statement of finalise.

    A key-share lock, because a turn that is being opened holds the session that finalise closes next and refers to this
    row: a stronger lock would deadlock.
    """
    locked = select(*columns_of(RolloutFacts, RolloutTable)).where(RolloutTable.id == rollout_id)
    row = (await connection.execute(locked.with_for_update(key_share=True))).one()
    exits = select(AttemptTable.agent_exit).where(AttemptTable.rollout_id == rollout_id)
    newest = await connection.execute(exits.order_by(AttemptTable.n.desc()).limit(1))
    return replace(RolloutFacts(*row), agent_exit=newest.scalar_one_or_none())


async def agent_exit_of(connection: AsyncConnection, rollout_id: int, attempt: int) -> str | None:
    statement = select(AttemptTable.agent_exit).where(AttemptTable.rollout_id == rollout_id, AttemptTable.n == attempt)
    return (await connection.execute(statement)).scalar_one_or_none()


async def close_sessions(connection: AsyncConnection, rollout_id: int) -> int:
    """Close the rollout's sessions and return how many were open; turns in flight are aborted, not stored."""
    closing = update(SessionTable).where(SessionTable.rollout_id == rollout_id, SessionTable.state == SessionState.OPEN)
    closed = await connection.execute(closing.values(state=SessionState.CLOSED, closed_at=func.now()))
    aborting = update(TurnTable).where(TurnTable.rollout_id == rollout_id, TurnTable.state == TurnState.IN_FLIGHT)
    await connection.execute(aborting.values(state=TurnState.ABORTED))
    return closed.rowcount


async def set_outcome(connection: AsyncConnection, rollout_id: int, values: OutcomeValues) -> None:
    """Write the outcome of a rollout that has none and whose lock the caller holds, and apply its group's rule.

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


async def temperature_of(connection: AsyncConnection, rollout_id: int) -> float:
    statement = select(RolloutTable.temperature).where(RolloutTable.id == rollout_id)
    return (await connection.execute(statement)).scalar_one()


async def run_of_rollout(connection: AsyncConnection, rollout_id: int) -> str:
    statement = select(RolloutTable.run_id).where(RolloutTable.id == rollout_id)
    return (await connection.execute(statement)).scalar_one()


async def is_rollout_open(connection: AsyncConnection, rollout_id: int) -> bool:
    statement = select(RolloutTable.outcome).where(RolloutTable.id == rollout_id)
    return (await connection.execute(statement)).scalar_one() is None


@dataclass(slots=True, frozen=True)
class ClaimedRollout:
    """An open rollout and the workflow that claimed it. `owner`: the Temporal run id."""

    id: int
    workflow_id: str
    group_id: int | None
    owner: str | None


async def claimed_and_open(connection: AsyncConnection) -> list[ClaimedRollout]:
    """Return the rollouts that a workflow has claimed and that have no outcome."""
    statement = select(*columns_of(ClaimedRollout, RolloutTable)).where(
        RolloutTable.outcome.is_(None), RolloutTable.owner.is_not(None)
    )
    return [ClaimedRollout(*row) for row in await connection.execute(statement.order_by(RolloutTable.id))]


async def update_reward(connection: AsyncConnection, rollout_id: int, values: OutcomeValues) -> bool:
    """Store a new verdict's reward; False if the rollout or its group was cancelled, or the rollout replaced. A step
    that has used the group keeps the rewards that it was planned with, in its plan row and in `batch_item`."""
    cancelled = select(RolloutGroupTable.id).where(
        RolloutGroupTable.id == RolloutTable.group_id, RolloutGroupTable.state == GroupState.CANCELLED
    )
    statement = update(RolloutTable).where(
        RolloutTable.id == rollout_id,
        RolloutTable.outcome.is_not(None),
        RolloutTable.outcome != Outcome.CANCELLED,
        RolloutTable.replaced_by.is_(None),
        ~cancelled.exists(),
    )
    return bool((await connection.execute(statement.values(**values))).rowcount == 1)
