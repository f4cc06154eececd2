"""Lists of rollouts with filters, newest, ended last or longest first, paged by the id of the last one."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Label, Select, case, false, func, literal, literal_column, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject, TurnState
from reads.runs import is_flagged
from store.columns import columns_of
from store.open_rollouts import ids_in_stage
from store.schema import GradeTable, RolloutGroupTable, RolloutTable, TaskTable, TurnTable

OPEN = "open"
"""The value of the outcome filter for rollouts without an outcome."""
NO_EXIT = "none"
"""The value of the filter of agents' exits for rollouts without one."""
SORTED_OF = 1000
"""The rollouts that are sorted by their end or duration: the newest that match. No index has these."""
SORTS = ("newest", "ended", "longest")


@dataclass(slots=True, frozen=True)
class RolloutFilter:
    """The condition for rollouts that a list shows; None stands for no condition.

    `task`: a part of the task's label. `reason`: a part of the outcome's reason, such as an error's class.
    `policy_step`: newest published step when the rollout's group was made. `evaluation`: an evaluation's label.
    `flagged`: only grades with flags or a rejection. `stage`: one of `store.open_rollouts.STAGES`; it needs
    `run_id`. `has_started`: only those that a worker has begun, or that have ended.
    """

    run_id: str | None = None
    purpose: str | None = None
    outcome: str | None = None
    agent_exit: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    task_id: int | None = None
    task: str | None = None
    reason: str | None = None
    policy_step: int | None = None
    evaluation: str | None = None
    flagged: bool = False
    stage: str | None = None
    has_started: bool = False


@dataclass(slots=True, frozen=True)
class RolloutFields:
    """The fields of a rollout in a list and on its own. `group_no`: the group's number in its run, by which people and
    commands name it. `timings`: seconds of its stages, once it has ended. `num_turns`: model calls so far."""

    id: int
    run_id: str
    group_id: int | None
    group_no: int | None
    member: int
    purpose: str
    task_id: int
    task: str
    harness: str
    outcome: str | None
    reward: float | None
    agent_exit: str | None
    num_turns: int
    num_trained_tokens: int
    late: bool
    replaced_by: int | None
    created_at: datetime
    claimed_at: datetime | None
    ended_at: datetime | None
    timings: dict[str, float]
    workflow_id: str


@dataclass(slots=True, frozen=True)
class RolloutLine(RolloutFields):
    """A rollout in a list, with the verdict that decided its reward."""

    reason: str
    policy_step: int | None
    solved: bool | None
    rule: str | None
    flags: list[JsonObject] | None


def _lines() -> Select[*tuple[Any, ...]]:
    is_call = (TurnTable.attempt == RolloutTable.attempt) & (TurnTable.state == TurnState.COMPLETED)
    calls = select(func.count()).where(TurnTable.rollout_id == RolloutTable.id, is_call)
    columns = columns_of(
        RolloutLine,
        RolloutTable,
        group_no=RolloutGroupTable.group_no,
        num_turns=case((RolloutTable.outcome.is_(None), calls.scalar_subquery()), else_=RolloutTable.num_turns),
        task=TaskTable.label,
        reason=RolloutTable.outcome_reason,
        policy_step=RolloutGroupTable.started_step,
        solved=GradeTable.solved,
        rule=GradeTable.rule,
        flags=GradeTable.flags,
    )
    return (
        select(*columns)
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .outerjoin(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .outerjoin(GradeTable, GradeTable.id == RolloutTable.grade_id)
    )


def _filtered(statement: Select[*tuple[Any, ...]], wanted: RolloutFilter) -> Select[*tuple[Any, ...]]:
    equal = {
        RolloutTable.run_id: wanted.run_id,
        RolloutTable.purpose: wanted.purpose,
        RolloutTable.task_id: wanted.task_id,
        RolloutGroupTable.started_step: wanted.policy_step,
        RolloutGroupTable.label: wanted.evaluation,
        RolloutTable.outcome: wanted.outcome,
        RolloutTable.agent_exit: wanted.agent_exit,
    }
    none: dict[Any, str] = {RolloutTable.outcome: OPEN, RolloutTable.agent_exit: NO_EXIT}
    for column, value in equal.items():
        if value is not None:
            statement = statement.where(column.is_(None) if value == none.get(column) else column == value)
    if wanted.reward_from is not None:
        statement = statement.where(RolloutTable.reward >= wanted.reward_from)
    if wanted.reward_to is not None:
        statement = statement.where(RolloutTable.reward <= wanted.reward_to)
    if wanted.task:
        statement = statement.where(TaskTable.label.icontains(wanted.task, autoescape=True))
    if wanted.reason:
        statement = statement.where(RolloutTable.outcome_reason.icontains(wanted.reason, autoescape=True))
    if wanted.flagged:
        statement = statement.where(is_flagged())
    if wanted.stage and wanted.run_id:
        statement = statement.where(RolloutTable.id.in_(ids_in_stage(wanted.run_id, wanted.stage)))
    if wanted.has_started:
        statement = statement.where(RolloutTable.owner.is_not(None) | RolloutTable.outcome.is_not(None))
    return statement


async def list_rollout_lines(
    connection: AsyncConnection, wanted: RolloutFilter, limit: int, before: int | None = None
) -> list[RolloutLine]:
    """Return rollouts, newest first; `before`: the id of the last rollout of the page before."""
    statement = _filtered(_lines(), wanted).order_by(RolloutTable.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(RolloutTable.id < before)
    return [RolloutLine(*row) for row in await connection.execute(statement)]


async def list_sorted_rollouts(
    connection: AsyncConnection, wanted: RolloutFilter, sort: str, limit: int, before: int | None = None
) -> list[RolloutLine]:
    """Return rollouts by one of `SORTS`, but for `newest` among the `SORTED_OF` newest that match: by `ended` those
    that ended last first, and open ones behind them; by `longest` the longest first, and open ones count until now.

    `before`: the id of the last rollout of the page before.
    """
    if sort == "newest":
        return await list_rollout_lines(connection, wanted, limit, before)
    matching = _filtered(_lines().with_only_columns(RolloutTable.id, _key(sort)), wanted)
    window = matching.order_by(RolloutTable.id.desc()).limit(SORTED_OF).subquery()
    order = tuple_(window.c.key, window.c.id)
    page = select(window.c.id).order_by(window.c.key.desc(), window.c.id.desc()).limit(limit)
    if before is not None:
        last = select(_key(sort)).where(RolloutTable.id == before).scalar_subquery()
        page = page.where(order < tuple_(last, literal(before)))
    ids = list((await connection.execute(page)).scalars())
    lines = await lines_of_ids(connection, ids)
    return [lines[one] for one in ids]


def _key(sort: str) -> Label[Any]:
    if sort == "ended":
        return func.coalesce(RolloutTable.ended_at, literal_column("'-infinity'::timestamptz")).label("key")
    return (func.coalesce(RolloutTable.ended_at, func.now()) - RolloutTable.created_at).label("key")


async def list_members(connection: AsyncConnection, group_id: int) -> list[RolloutLine]:
    """Return every rollout of a group in the order of its members, replaced ones included."""
    statement = _lines().where(RolloutTable.group_id == group_id).order_by(RolloutTable.member)
    return [RolloutLine(*row) for row in await connection.execute(statement)]


async def lines_of_ids(connection: AsyncConnection, rollout_ids: list[int]) -> dict[int, RolloutLine]:
    statement = _lines().where(RolloutTable.id.in_(rollout_ids) if rollout_ids else false())
    return {line.id: line for line in (RolloutLine(*row) for row in await connection.execute(statement))}
