"""Queries that a monitoring system makes every few seconds: open runs, their rollouts, learners, engines and boxes.

Their number is fixed for any number of runs; each reads rows that are open now, by an index.
"""

from dataclasses import dataclass

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import OPEN_STATES, EngineState, RunState, SandboxState
from store import box_failures, learners
from store.box_failures import BoxCounts
from store.columns import seconds_of
from store.runs import ADHOC
from store.schema import EngineTable, MetricTable, RolloutTable, RunTable, SandboxTable

STEP_METRICS = ("canary_gap_mean", "fork_drift_share", "mismatch_kl")
"""Metrics of a run's newest step that are passed on."""
_ORPHANED_AFTER_SECONDS = 600.0
"""Time after the end of its rollout from which a box that is held has no owner; the sweep should have released it."""


@dataclass(slots=True, frozen=True)
class OpenRun:
    """A run that is running or paused. Ages are in seconds, 0 without such a rollout.

    `num_waiting`: open rollouts whose workflow has not begun. `learner_silent_seconds`: None if it needs no learner.
    """

    run_id: str
    state: RunState
    step: int
    num_open: int
    num_waiting: int
    oldest_waiting_seconds: float
    oldest_open_seconds: float
    learner_silent_seconds: float | None
    metrics: dict[str, float]


@dataclass(slots=True, frozen=True)
class Monitored:
    """`boxes`: counts by state. `boxes_without_owner`: held although their rollout has ended. `engines`: counts by
    engine set and state."""

    runs: list[OpenRun]
    boxes: dict[SandboxState, int]
    boxes_without_owner: int
    recent: BoxCounts
    engines: dict[tuple[str, EngineState], int]


async def read_monitored(connection: AsyncConnection) -> Monitored:
    held = SandboxTable.state != SandboxState.RELEASED
    boxes = select(SandboxTable.state, func.count()).where(held).group_by(SandboxTable.state)
    ended_long_ago = seconds_of(func.now() - RolloutTable.ended_at) > _ORPHANED_AFTER_SECONDS
    orphans = select(func.count()).join(RolloutTable, RolloutTable.id == SandboxTable.rollout_id)
    orphans = orphans.select_from(SandboxTable).where(held, RolloutTable.outcome.is_not(None), ended_long_ago)
    key = (EngineTable.engine_set, EngineTable.state)
    engines = select(*key, func.count()).group_by(*key)
    return Monitored(
        runs=await _open_runs(connection),
        boxes={SandboxState(row[0]): row[1] for row in await connection.execute(boxes)},
        boxes_without_owner=int((await connection.execute(orphans)).scalar_one()),
        recent=await box_failures.count_boxes(connection),
        engines={(row[0], EngineState(row[1])): row[2] for row in await connection.execute(engines)},
    )


async def _open_runs(connection: AsyncConnection) -> list[OpenRun]:
    is_open = RunTable.state.in_(OPEN_STATES) & (RunTable.config_name != ADHOC)
    columns = select(RunTable.run_id, RunTable.state, RunTable.step).where(is_open)
    rows = (await connection.execute(columns.order_by(RunTable.created_at))).all()
    waits = RolloutTable.owner.is_(None)
    age = seconds_of(func.now() - RolloutTable.created_at)
    at_work = seconds_of(func.now() - RolloutTable.claimed_at)
    counts = (
        select(
            RolloutTable.run_id,
            func.count(),
            func.count().filter(waits),
            func.coalesce(func.max(age).filter(waits), 0),
            func.coalesce(func.max(at_work), 0),
        )
        .where(RolloutTable.outcome.is_(None), RolloutTable.run_id.in_([row.run_id for row in rows]))
        .group_by(RolloutTable.run_id)
    )
    rollouts = {row[0]: row[1:] for row in await connection.execute(counts)}
    silent = await learners.runs_wanting_learner(connection)
    newest = select(MetricTable.run_id, MetricTable.name, MetricTable.value).where(
        tuple_(MetricTable.run_id, MetricTable.step).in_([(row.run_id, row.step) for row in rows]),
        MetricTable.name.in_(STEP_METRICS),
    )
    metrics: dict[str, dict[str, float]] = {}
    for run_id, name, value in await connection.execute(newest):
        metrics.setdefault(run_id, {})[name] = value
    found = []
    for row in rows:
        num_open, num_waiting, waiting, working = rollouts.get(row.run_id, (0, 0, 0.0, 0.0))
        learner = silent.get(row.run_id)
        values = metrics.get(row.run_id, {})
        state = RunState(row.state)
        found.append(OpenRun(row.run_id, state, row.step, num_open, num_waiting, waiting, working, learner, values))
    return found
