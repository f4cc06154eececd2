"""Groups of a run: lines of them, lists by what has become of them with the reason, and the counts of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import ARRAY, BigInteger, ColumnElement, Select, any_, case, exists, func, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import (
    OPEN_STATES,
    REWARDED_OUTCOMES,
    BatchState,
    GroupProgress,
    GroupState,
    Outcome,
    Purpose,
    SteeringAction,
)
from reads.step_rows import discarded_plans
from store.columns import columns_of, read_one
from store.groups import GROUP_CANCELLED
from store.schema import BatchItemTable, BatchTable, RolloutGroupTable, RolloutTable, RunTable, SteeringTable, TaskTable

_WITHOUT_A_STEP = (GroupState.FAILED, GroupState.CANCELLED)
_USES = (GroupProgress.TRAINED, GroupProgress.NO_SIGNAL, GroupProgress.EXPIRED)
_E = TypeVar("_E", bound=StrEnum)


@dataclass(slots=True, frozen=True)
class GroupFilter:
    """The condition for groups of a run that a list shows; None stands for no condition."""

    state: GroupProgress | None = None
    purpose: Purpose | None = None


def read_group_filter(state: str | None, purpose: str | None) -> GroupFilter:
    """Return the filter of these words; an empty one is no condition. Raises ConfigError for a word without meaning."""
    return GroupFilter(_one_of(GroupProgress, "state", state), _one_of(Purpose, "purpose", purpose))


def _one_of(values: type[_E], name: str, word: str | None) -> _E | None:
    if not word:
        return None
    word = word.replace(" ", "_")  # as tables print it
    if word not in list(values):
        raise ConfigError(f"{name}: expected one of {', '.join(values)}, found {word!r}")
    return values(word)


@dataclass(slots=True, frozen=True)
class GroupCount:
    purpose: str
    state: GroupProgress
    number: int


@dataclass(slots=True, frozen=True)
class GroupLine:
    """A group in a list. `group_no`: its number in its run, by which people and commands name it. `num_ended`: of the
    `size` members that were not replaced; `lowest` and `highest`: of their rewards.

    `step`: the one that consumed it; `use`: what it did with the group. None without one."""

    group_id: int
    run_id: str
    group_no: int
    task_id: int
    task: str
    purpose: str
    label: str
    state: str
    size: int
    num_ended: int
    lowest: float | None
    highest: float | None
    started_step: int
    step: int | None
    use: str | None
    created_at: datetime


@dataclass(slots=True, frozen=True)
class ListedGroup(GroupLine):
    """A group with what has become of it. `why`: one sentence on what it waits for, or why it ended so."""

    state: GroupProgress
    why: str


@dataclass(slots=True, frozen=True)
class _EndedGroup:
    """A group that no step has consumed. `reason`: the commonest one of the members that ended without a reward."""

    workflow_id: str
    min_graded: int
    num_rewarded: int
    reason: str


def group_lines() -> Select[*tuple[Any, ...]]:
    members = (
        select(
            func.count(RolloutTable.outcome).label("ended"),
            func.min(RolloutTable.reward).label("lowest"),
            func.max(RolloutTable.reward).label("highest"),
        )
        .where(RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.replaced_by.is_(None))
        .lateral()
    )
    use = (
        select(BatchItemTable.step, BatchItemTable.use)
        .where(BatchItemTable.run_id == RolloutGroupTable.run_id, BatchItemTable.group_id == RolloutGroupTable.id)
        .limit(1)
        .lateral()
    )
    columns = columns_of(
        GroupLine,
        RolloutGroupTable,
        group_id=RolloutGroupTable.id,
        task=TaskTable.label,
        num_ended=members.c.ended,
        lowest=members.c.lowest,
        highest=members.c.highest,
        step=use.c.step,
        use=use.c.use,
    )
    return (
        select(*columns)
        .join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
        .join(members, true())
        .outerjoin(use, true())
    )


async def list_groups_of_step(connection: AsyncConnection, run_id: str, step: int) -> list[GroupLine]:
    """Return every group that the step consumed, trained or not, with the rewards that it was consumed with."""
    columns = (BatchItemTable.group_id, BatchItemTable.use, BatchItemTable.rewards)
    items = select(*columns).where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
    consumed = {row.group_id: row for row in await connection.execute(items)}
    statement = group_lines().where(RolloutGroupTable.id == any_(_ids(list(consumed))))
    found = []
    for row in await connection.execute(statement.order_by(RolloutGroupTable.group_no)):
        _, use, rewards = consumed[row.group_id]
        seen = {"lowest": min(rewards, default=None), "highest": max(rewards, default=None)}
        found.append(GroupLine(**{**row._mapping, "step": step, "use": use, **seen}))
    return found


async def read_group_line(connection: AsyncConnection, group_id: int) -> GroupLine | None:
    return await read_one(connection, GroupLine, group_lines().where(RolloutGroupTable.id == group_id))


async def count_groups_by_progress(connection: AsyncConnection, run_id: str) -> list[GroupCount]:
    """Return the number of the run's groups by purpose and by what has become of them, in the enum's order."""
    table = RolloutGroupTable
    keys = (table.purpose, table.state)
    by_state = select(*keys, func.count()).where(table.run_id == run_id).group_by(*keys)
    counts: Counter[tuple[str, str]] = Counter()
    for purpose, state, number in await connection.execute(by_state):
        counts[purpose, state] = number
    if counts.pop((Purpose.TRAIN, GroupState.CONSUMED), 0):
        is_planned = BatchItemTable.step.in_(_planned_steps(run_id)) & (BatchItemTable.use == GroupProgress.TRAINED)
        uses = select(BatchItemTable.use, is_planned, func.count()).where(BatchItemTable.run_id == run_id)
        for use, planned, number in await connection.execute(uses.group_by(BatchItemTable.use, is_planned)):
            counts[Purpose.TRAIN, GroupProgress.PLANNED if planned else use] += number
    num_discarded = sum(len(plan.groups) for plan in await discarded_plans(connection, run_id))
    counts[Purpose.TRAIN, GroupProgress.DISCARDED] = num_discarded
    counts[Purpose.TRAIN, GroupState.CANCELLED] -= num_discarded
    return [
        GroupCount(purpose, state, counts[purpose, state])
        for purpose in Purpose
        for state in GroupProgress
        if counts[purpose, state] > 0
    ]


async def list_groups(
    connection: AsyncConnection, run_id: str, only: GroupFilter, limit: int, before: int | None = None
) -> list[ListedGroup]:
    """Return the run's groups, newest first; `before`: the number of the last group of the page before."""
    table = RolloutGroupTable
    # All of them, so that the index by purpose and state can be used.
    purposes = list(Purpose) if only.purpose is None else [only.purpose]
    wanted = (table.run_id == run_id) & table.purpose.in_(purposes)
    if only.state is not None:
        wanted &= _has_become(run_id, only.state)
    if before is not None:
        wanted &= table.group_no < before
    ids = list(await connection.scalars(select(table.id).where(wanted).order_by(table.group_no.desc()).limit(limit)))
    rows = await connection.execute(group_lines().where(table.id == any_(_ids(ids))).order_by(table.group_no.desc()))
    lines = [GroupLine(*row) for row in rows]
    return await _with_reasons(connection, run_id, lines)


def _ids(values: Sequence[int]) -> ColumnElement[Any]:
    """Return ids as one parameter, since Postgres takes at most 32,767 of them."""
    return literal(list(values), ARRAY(BigInteger))


def _planned_steps(run_id: str) -> Any:
    return select(BatchTable.step).where(BatchTable.run_id == run_id, BatchTable.state == BatchState.PLANNED)


def _discarded_groups(run_id: str) -> Any:
    """Return the workflows of the groups whose plan rows people have discarded."""
    return select(func.jsonb_array_elements_text(SteeringTable.before)).where(
        SteeringTable.run_id == run_id, SteeringTable.action == SteeringAction.SKIP_STEP
    )


def _has_become(run_id: str, progress: GroupProgress) -> ColumnElement[bool]:
    table, item = RolloutGroupTable, BatchItemTable
    if progress is GroupProgress.DISCARDED:
        return (table.state == GroupState.CANCELLED) & table.workflow_id.in_(_discarded_groups(run_id))
    if progress is GroupProgress.CANCELLED:
        return (table.state == GroupState.CANCELLED) & table.workflow_id.not_in(_discarded_groups(run_id))
    if progress in _USES or progress is GroupProgress.PLANNED:
        use = GroupProgress.TRAINED if progress is GroupProgress.PLANNED else progress
        used = (item.run_id == run_id) & (item.group_id == table.id) & (item.use == use)
        if progress is GroupProgress.PLANNED:
            used &= item.step.in_(_planned_steps(run_id))
        elif progress is GroupProgress.TRAINED:
            used &= item.step.not_in(_planned_steps(run_id))
        return (table.state == GroupState.CONSUMED) & exists().where(used)
    return table.state == progress


async def _with_reasons(connection: AsyncConnection, run_id: str, lines: Sequence[GroupLine]) -> list[ListedGroup]:
    planned = set((await connection.execute(_planned_steps(run_id))).scalars())
    state = (await connection.execute(select(RunTable.state).where(RunTable.run_id == run_id))).scalar_one()
    has_ended = state not in OPEN_STATES
    ended = await _ended_groups(connection, [one.group_id for one in lines if one.state in _WITHOUT_A_STEP])
    plans = await discarded_plans(connection, run_id) if ended else []
    discarded = {name: plan for plan in plans for name in plan.groups}
    cancels = await _cancel_requests(connection, run_id) if ended else {}
    listed = []
    for one in lines:
        facts = ended.get(one.group_id)
        if facts is None:
            is_planned = one.use == GroupProgress.TRAINED and one.step in planned
            progress = GroupProgress.PLANNED if is_planned else GroupProgress(one.use or one.state)
            why = _why_used(one, progress, has_ended)
        elif facts.workflow_id in discarded:
            progress = GroupProgress.DISCARDED
            why = discarded[facts.workflow_id].sentence()
        else:
            progress = GroupProgress(one.state)
            asked = cancels.get(facts.workflow_id) or cancels.get(f"evaluate/{run_id}/{one.label}")
            why = _why_ended(facts, progress, asked)
        listed.append(ListedGroup(**asdict(one) | {"state": progress, "why": why}))
    return listed


async def _ended_groups(connection: AsyncConnection, group_ids: Sequence[int]) -> dict[int, _EndedGroup]:
    table, member = RolloutGroupTable, RolloutTable
    has_reward = member.outcome.in_(REWARDED_OUTCOMES)
    # A group fails for what its members lacked; one that is cancelled ended for the reason of its cancelled members.
    is_cause = case(
        (table.state == GroupState.CANCELLED, member.outcome == Outcome.CANCELLED), else_=~has_reward
    ) & member.outcome_reason.not_in(("", GROUP_CANCELLED))
    reason = func.mode().within_group(member.outcome_reason).filter(member.outcome.is_not(None), is_cause)
    statement = (
        select(
            table.id, table.workflow_id, table.min_graded, func.count().filter(has_reward), func.coalesce(reason, "")
        )
        .outerjoin(member, (member.group_id == table.id) & member.replaced_by.is_(None))
        .where(table.id == any_(_ids(group_ids)))
        .group_by(table.id)
    )
    return {row[0]: _EndedGroup(*row[1:]) for row in await connection.execute(statement)}


async def _cancel_requests(connection: AsyncConnection, run_id: str) -> dict[str, str]:
    """Return who cancelled each group or evaluation of the run, and why, by its workflow."""
    table = SteeringTable
    statement = select(table.target, table.asked_by, table.reason).where(
        table.run_id == run_id, table.action == SteeringAction.CANCEL
    )
    return {
        target: f"{asked_by} cancelled it" + (f": {reason}" if reason else "")
        for target, asked_by, reason in await connection.execute(statement)
    }


def _why_used(group: GroupLine, progress: GroupProgress, has_run_ended: bool) -> str:
    match progress:
        case GroupProgress.OPEN:
            return f"{group.num_ended} of {group.size} members have ended"
        case GroupProgress.READY:
            waits = "no step took it before the run ended" if has_run_ended else "it waits for a step"
            return "its verdicts are in" + (f"; {waits}" if group.purpose == Purpose.TRAIN else "")
        case GroupProgress.PLANNED:
            return f"step {group.step} is planned with it"
        case GroupProgress.NO_SIGNAL if group.lowest == group.highest and group.lowest is not None:
            return f"all of its rewards are {group.lowest:g}; step {group.step} left it out"
        case GroupProgress.NO_SIGNAL:
            return f"its rewards give no gradient; step {group.step} left it out"
        case GroupProgress.EXPIRED:
            return (
                "none of its tokens may be trained: they are older than training.max_staleness allows, truncated, or "
                f"in chains longer than training.bin_tokens; step {group.step} left it out"
            )
    return f"step {group.step} trained it"


def _why_ended(group: _EndedGroup, progress: GroupProgress, asked: str | None) -> str:
    if progress is GroupProgress.CANCELLED:
        return asked or group.reason or "its run was cancelled or has ended"
    reason = f": {group.reason}" if group.reason else ""
    return f"{group.num_rewarded} rewards, and it needs {group.min_graded}{reason}"
