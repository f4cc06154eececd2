"""The open rollouts of a run by stage, and for how long."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Exists, Select, case, desc, exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import SandboxRole, SandboxState
from store.columns import seconds_of
from store.schema import PatchTable, RolloutGroupTable, RolloutTable, SandboxTable, SessionTable, TurnTable

NOT_STARTED = "not started"
WAITS_FOR_BOX = "waits for a box"
BOOT_FAILS = "boot fails"
BOOTS = "box boots"
NO_CALL_YET = "no model call yet"
"""The rollout's workspace is prepared, or its agent starts."""
AGENT_WORKS = "agent works"
WAITS_FOR_GRADING_BOX = "waits for a grading box"
IS_GRADED = "is graded"
ENDS = "ends"


@dataclass(slots=True, frozen=True)
class StageCount:
    """The number of a run's open rollouts in one stage; `longest_seconds`: the time that the slowest has been in it."""

    stage: str
    count: int
    longest_seconds: float


@dataclass(slots=True, frozen=True)
class OpenRollout:
    """An open rollout, its stage, and for how long it has been in it.

    `group`: the workflow id of its group, or of its evaluation, by which commands name it; empty for a rollout by hand.
    """

    rollout_id: int
    group_id: int | None
    group: str
    member: int
    stage: str
    seconds: float


_target = func.regexp_replace(RolloutGroupTable.workflow_id, "(evaluate/[^/]+/[^/]+)/.*", r"\1")
"""Without the number of a group in its evaluation, which is cancelled and retried as a whole."""


STAGES = (
    NOT_STARTED,
    WAITS_FOR_BOX,
    BOOT_FAILS,
    BOOTS,
    NO_CALL_YET,
    AGENT_WORKS,
    WAITS_FOR_GRADING_BOX,
    IS_GRADED,
    ENDS,
)


def ids_in_stage(run_id: str, stage: str) -> Select[int]:
    """Select the ids of the run's open rollouts that are in this one of `STAGES`."""
    open_rollouts = _by_stage(RolloutTable.run_id == run_id).subquery()
    return select(open_rollouts.c.id).where(open_rollouts.c.stage == stage)


async def stages_of(connection: AsyncConnection, rollout_ids: Collection[int]) -> dict[int, str]:
    """Return the stage of each of these rollouts that is open, by id."""
    if not rollout_ids:
        return {}
    rows = await connection.execute(_by_stage(RolloutTable.id.in_(rollout_ids)))
    return {row.id: row.stage for row in rows}


def _by_stage(condition: ColumnElement[bool]) -> Select[int, int | None, str, int, str, float]:
    """Select the open rollouts that the condition is true of, each with its stage and how long it has been in it."""
    held = SandboxTable.state != SandboxState.RELEASED
    newest = (
        select(
            SandboxTable.role,
            SandboxTable.state,
            SandboxTable.boot_error,
            func.coalesce(SandboxTable.released_at, SandboxTable.live_at, SandboxTable.created_at).label("since"),
        )
        .where(SandboxTable.rollout_id == RolloutTable.id, held)
        .order_by(SandboxTable.id.desc())
        .limit(1)
        .lateral()
    )
    creating = newest.c.state == SandboxState.CREATING
    stage = case(
        (RolloutTable.owner.is_(None), NOT_STARTED),
        (creating & (newest.c.boot_error == ""), WAITS_FOR_BOX),
        (creating & newest.c.boot_error.is_not(None), BOOT_FAILS),
        (creating, BOOTS),
        (newest.c.state == SandboxState.RELEASE_WANTED, ENDS),
        (newest.c.role == SandboxRole.GRADE, IS_GRADED),
        ((newest.c.role == SandboxRole.AGENT) & ~_has_called(), NO_CALL_YET),
        (newest.c.role == SandboxRole.AGENT, AGENT_WORKS),
        (exists().where(PatchTable.rollout_id == RolloutTable.id), WAITS_FOR_GRADING_BOX),
        else_=WAITS_FOR_BOX,
    )
    ended = select(func.max(SandboxTable.released_at)).where(SandboxTable.rollout_id == RolloutTable.id)
    since = func.coalesce(newest.c.since, ended.scalar_subquery(), RolloutTable.claimed_at, RolloutTable.created_at)
    seconds = seconds_of(func.now() - since)
    return (
        select(
            RolloutTable.id,
            RolloutTable.group_id,
            func.coalesce(_target, "").label("group"),
            RolloutTable.member,
            stage.label("stage"),
            seconds.label("seconds"),
        )
        .select_from(RolloutTable)
        .outerjoin(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .outerjoin(newest, newest.c.role.is_not(None))
        .where(RolloutTable.outcome.is_(None), condition)
    )


def _has_called() -> Exists:
    """Return the condition that an agent of the rollout has made a model call, in any of its boxes."""
    return (
        exists(TurnTable.id)
        .where(TurnTable.session_id == SessionTable.id, SessionTable.rollout_id == RolloutTable.id)
        .correlate(RolloutTable)
    )


async def count_open_rollouts(connection: AsyncConnection, run_id: str) -> list[StageCount]:
    """Return the stages in which the run has open rollouts, the slowest first."""
    open_rollouts = _by_stage(RolloutTable.run_id == run_id).subquery()
    longest = func.max(open_rollouts.c.seconds)
    statement = select(open_rollouts.c.stage, func.count(), longest).group_by(open_rollouts.c.stage)
    rows = await connection.execute(statement.order_by(longest.desc()))
    return [StageCount(*row) for row in rows]


async def list_slowest(connection: AsyncConnection, run_id: str, limit: int) -> list[OpenRollout]:
    """Return the run's open rollouts that have been in their stage for longest, the longest first."""
    statement = _by_stage(RolloutTable.run_id == run_id).order_by(desc("seconds"), RolloutTable.id).limit(limit)
    return [OpenRollout(*row) for row in await connection.execute(statement)]


async def oldest_open_workflows(connection: AsyncConnection, run_id: str, limit: int) -> list[str]:
    """Return the workflow ids of the run's rollouts that have been open for longest."""
    statement = (
        select(RolloutTable.workflow_id)
        .where(RolloutTable.run_id == run_id, RolloutTable.outcome.is_(None), RolloutTable.owner.is_not(None))
        .order_by(RolloutTable.id)
        .limit(limit)
    )
    return list((await connection.execute(statement)).scalars())
