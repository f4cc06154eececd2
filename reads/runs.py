"""Runs: the list, one run's row, its rollouts counted by outcome and reward, and its flagged verdicts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, any_, func, literal, literal_column, null, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet import secrets
from ratchet.errors import ConfigError
from ratchet.types import JsonObject
from reads.curves import newest_rewards
from store.columns import columns_of, read_one
from store.names import Kind, require_named
from store.open_runs import newest_run
from store.runs import ADHOC, RunFields
from store.schema import GradeTable, RolloutTable, RunTable


@dataclass(slots=True, frozen=True)
class RunSummary:
    """One line of the list of runs; `RunTable` describes the columns. `is_by_hand`: it holds rollouts that people
    start; it trains nothing and never ends. `endpoint`: url and model of what answers in place of the policy.
    `training_reward`: the mean over all groups that the newest step consumed; None before the first step.
    `num_groups`: groups that were started. `num_open`: rollouts that have not ended."""

    run_id: str
    config_name: str
    engine_set: str
    endpoint: JsonObject | None
    state: str
    reason: str
    wish: str
    stop_at: int | None
    epoch: int
    step: int
    checkpoint_step: int
    best_step: int | None
    best_rate: float | None
    num_steps: int
    num_groups: int
    num_open: int
    training_reward: float | None
    created_at: datetime
    ended_at: datetime | None
    is_by_hand: bool


@dataclass(slots=True, frozen=True)
class RunHead(RunFields):
    """A run for people. `config`: with `***` for values of `harness.extra_env` that are written out."""

    init_from: str | None
    restarts: int
    archived_at: datetime | None
    created_at: datetime
    ended_at: datetime | None


@dataclass(slots=True, frozen=True)
class VerdictCount:
    """The number of rollouts that are alike in these columns. `outcome`, `agent_exit`: None while they are open."""

    purpose: str
    outcome: str | None
    agent_exit: str | None
    reward: float | None
    number: int


@dataclass(slots=True, frozen=True)
class FlaggedCount:
    """The numbers of a run's rollouts with flagged verdicts. `num_flagged`: the verdict that decided the reward has
    flags; `num_rejected`: a rule rejected the patch in it. `num_others`: ended rollouts with flags only in verdicts
    that decided no reward: those of `ratchet tasks regrade` without `--adopt`, and earlier ones; `newest_others`: at
    most 20 of them."""

    num_flagged: int
    num_rejected: int
    num_others: int
    newest_others: list[int]


def shown_endpoint(endpoint: JsonObject | None) -> JsonObject | None:
    """Return what people are told of a config's endpoint, None if the policy answers."""
    return {name: endpoint.get(name) for name in ("url", "model", "tokens")} if endpoint else None


async def list_run_summaries(
    connection: AsyncConnection,
    limit: int | None = None,
    before: tuple[datetime, str] | None = None,
    by_hand: bool | None = None,
) -> list[RunSummary]:
    """Return runs, all or `limit`, newest first; `before`: the (created_at, run_id) of the last run of the page before.

    `by_hand`: only those of rollouts by hand, or only the others; None: both."""
    page = select(RunTable).order_by(RunTable.created_at.desc(), RunTable.run_id.desc()).limit(limit)
    if before is not None:
        page = page.where(tuple_(RunTable.created_at, RunTable.run_id) < tuple_(*map(literal, before)))
    if by_hand is not None:
        page = page.where((RunTable.config_name == ADHOC) == by_hand)
    run = page.subquery()
    counts = (
        select(func.count().label("open"))
        .where(RolloutTable.run_id == run.c.run_id, RolloutTable.outcome.is_(None))
        .lateral()
    )
    other: dict[str, Any] = {
        "endpoint": run.c.config["endpoint"],
        "reason": run.c.state_reason,
        "num_steps": func.coalesce(run.c.config["training"]["steps"].as_integer(), 0),
        "num_groups": run.c.next_group_no,
        "num_open": counts.c.open,
        "training_reward": null(),
        "is_by_hand": run.c.config_name == ADHOC,
    }
    statement = select(*columns_of(RunSummary, run.c, **other)).join(counts, true())
    rows = await connection.execute(statement.order_by(run.c.created_at.desc(), run.c.run_id.desc()))
    found = [replace(RunSummary(*row), endpoint=shown_endpoint(row.endpoint)) for row in rows]
    rewards = await newest_rewards(connection, [one.run_id for one in found])
    return [replace(one, training_reward=rewards[one.run_id].mean if one.run_id in rewards else None) for one in found]


@dataclass(slots=True, frozen=True)
class RolloutCount:
    """The number of a run's rollouts, and of those with a reward."""

    num_rollouts: int = 0
    num_graded: int = 0


async def count_rollouts(connection: AsyncConnection) -> dict[str, RolloutCount]:
    """Count the rollouts of each run; a run without any is missing."""
    counts = (RolloutTable.run_id, func.count(), func.count(RolloutTable.reward))
    rows = await connection.execute(select(*counts).group_by(RolloutTable.run_id))
    return {row[0]: RolloutCount(*row[1:]) for row in rows}


async def read_run_head(connection: AsyncConnection, run_id: str) -> RunHead | None:
    statement = select(*columns_of(RunHead, RunTable)).where(RunTable.run_id == run_id)
    head = await read_one(connection, RunHead, statement)
    return None if head is None else replace(head, config=secrets.redact_config(head.config))


async def require_run(connection: AsyncConnection, run_id: str | None) -> RunHead:
    """Return the run of this name; without one the newest open one, else the newest. Raises ConfigError without it."""
    if run_id is None and (run_id := await newest_run(connection)) is None:
        raise ConfigError("there is no run yet; `ratchet train CONFIG` starts one")
    head = await read_run_head(connection, (await require_named(connection, run_id, Kind.RUN)).run_id)
    assert head is not None, "found in the same transaction"
    return head


async def count_verdicts(connection: AsyncConnection, run_id: str) -> list[VerdictCount]:
    """Return the number of rollouts by purpose, outcome, exit and reward (few numbers): one pass over an index."""
    keys = (RolloutTable.purpose, RolloutTable.outcome, RolloutTable.agent_exit, RolloutTable.reward)
    statement = select(*keys, func.count()).where(RolloutTable.run_id == run_id).group_by(*keys)
    return [VerdictCount(*row) for row in await connection.execute(statement)]


def outcome_counts(counts: Sequence[VerdictCount]) -> list[VerdictCount]:
    """Add the counts up over all rewards, the commonest first."""
    numbers: Counter[VerdictCount] = Counter()
    for one in counts:
        numbers[replace(one, reward=None, number=0)] += one.number
    return [replace(one, number=number) for one, number in numbers.most_common()]


def reward_counts(counts: Sequence[VerdictCount], purpose: str) -> dict[float, int]:
    """Return reward → number of a purpose's rollouts that have exactly this reward, the lowest first."""
    numbers: Counter[float] = Counter()
    for one in counts:
        if one.purpose == purpose and one.reward is not None:
            numbers[one.reward] += one.number
    return dict(sorted(numbers.items()))


async def count_flagged(connection: AsyncConnection, run_id: str) -> FlaggedCount:
    decides = func.coalesce(GradeTable.id == RolloutTable.grade_id, False)
    one = (
        select(
            RolloutTable.id,
            func.bool_or(decides & ~GradeTable.rejected).label("flagged"),
            func.bool_or(decides & GradeTable.rejected).label("rejected"),
            # A verdict of an open rollout may still decide its reward.
            (~func.bool_or(decides) & RolloutTable.outcome.is_not(None)).label("other"),
        )
        .join(GradeTable, GradeTable.rollout_id == RolloutTable.id)
        .where(RolloutTable.run_id == run_id, _has_any_flagged_grade(), _has_flags(GradeTable))
        .group_by(RolloutTable.id)
        .cte()
    )
    newest = select(one.c.id).where(one.c.other).order_by(one.c.id.desc()).limit(20).scalar_subquery()
    flagged, rejected, other = (func.count().filter(column) for column in (one.c.flagged, one.c.rejected, one.c.other))
    counted = select(flagged, rejected, other, func.array(newest)).select_from(one)
    return FlaggedCount(*(await connection.execute(counted)).one())


def is_flagged() -> ColumnElement[bool]:
    """The condition that a rollout's deciding grade, which is joined, has flags or a rejection."""
    return _has_any_flagged_grade() & _has_flags(GradeTable)


def _has_any_flagged_grade() -> ColumnElement[bool]:
    """The condition that one of a rollout's grades has flags or a rejection.

    The rollouts with such a grade are few. The partial index `ix_grade_flagged` finds them first, as an array, because
    Postgres has no statistics of the condition and would otherwise read all rollouts. The zero is no parameter, because
    a plan for any value of it could not use the index.
    """
    grade = aliased(GradeTable)
    found = select(grade.rollout_id).where(_has_flags(grade)).scalar_subquery()
    return RolloutTable.id == any_(func.array(found))


def _has_flags(grade: type[GradeTable]) -> ColumnElement[bool]:
    return (func.jsonb_array_length(grade.flags) > literal_column("0")) | grade.rejected
