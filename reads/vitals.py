"""The facts that say if a run is well: the head of its page, `ratchet status RUN` and `ratchet watch` show the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.durations import duration_in_words
from ratchet.stored_config import read_stored_config
from ratchet.types import FAILED_OUTCOMES, RunState
from reads.curves import StepReward, metrics_by_step, newest_metric_step, rewards_by_step, times_by_step
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.run_comparison import pair_evaluations
from reads.runs import RunHead
from store.columns import seconds_of
from store.open_rollouts import StageCount
from store.runs import ADHOC
from store.schema import RolloutTable

_STEPS_FOR_ESTIMATE = 5
_STEPS_SHOWN = 20
_NOW_MINUTES = 10.0
_HOUR_SECONDS = 3600.0
_NEWEST_ROLLOUTS = 5000
"""Rollouts among which those that ended in the last two hours are counted."""
_CAUSE_CHARS = 60
_MAX_CAUSES = 3
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, frozen=True)
class Vital:
    """One fact about a run. `page`: path in the viewer of what it counts."""

    name: str
    value: str
    detail: str
    page: str


async def read_vitals(
    connection: AsyncConnection,
    head: RunHead,
    waits: Sequence[StageCount],
    rewards: Sequence[StepReward] | None = None,
    rates: Sequence[EvaluationRate] | None = None,
) -> list[Vital]:
    """Return the facts that are known. `waits`: the open rollouts by stage. `rewards`: of the newest steps, oldest
    first. What is None is read."""
    page, rollouts = f"/runs/{quote(head.run_id)}", f"/rollouts?run={quote(head.run_id)}"
    config = read_stored_config(head.config)
    recent = await _read_recent(connection, head.run_id)
    found = []
    if head.config_name != ADHOC:
        last = await newest_metric_step(connection, head.run_id)
        if rewards is None:
            rewards = await rewards_by_step(connection, head.run_id, last - _STEPS_SHOWN + 1, last)
        left = await _time_left(connection, head, config, recent.ended_now / _NOW_MINUTES)
        found.append(Vital("step", f"{head.step} of {config.training.steps}", left, f"{page}#steps"))
        found += await _held_out(connection, head.run_id, f"{rollouts}&purpose=eval", rates)
        if shown := rewards[-_STEPS_SHOWN:]:
            bars = sparkline([one.mean for one in shown])
            steps = f"{bars} step {shown[0].step} to {shown[-1].step}, all groups that were consumed"
            found.append(Vital("training reward", f"{shown[-1].mean:.2f}", steps, f"{rollouts}&purpose=train"))
        newest = (await metrics_by_step(connection, head.run_id, last, last)).get(last, {})
        if "staleness_mean" in newest:
            allowed = f"steps on average in step {last}; at most {config.training.max_staleness} are allowed"
            found.append(Vital("staleness", f"{newest['staleness_mean']:.1f}", allowed, f"{page}#curves"))
    found.append(Vital("rollouts a minute", f"{recent.ended_now / _NOW_MINUTES:.1f}", recent.pace, rollouts))
    found.append(Vital("without verdict", str(recent.failed), recent.causes, f"{page}#failures"))
    if waits:
        commonest = sorted(waits, key=lambda one: -one.count)
        told = [f"{one.count} {one.stage}, for up to {duration_in_words(one.longest_seconds)}" for one in commonest]
        open_now = sum(one.count for one in waits)
        found.append(Vital("open rollouts", str(open_now), ", ".join(told), f"{rollouts}&outcome=open"))
    return found


def sparkline(values: Sequence[float]) -> str:
    """Return a bar of text per value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    return "".join(_BARS[round((value - low) / (high - low) * 7) if high > low else 0] for value in values)


def seconds_left(step: int, num_steps: int, stepped_at: Sequence[float]) -> float | None:
    """Estimate from the moments (seconds) at which the newest steps were trained, oldest first; None without two.

    The median of their durations counts, so that a pause or an outage during one of them does not.
    """
    durations = [end - start for start, end in pairwise(stepped_at[-_STEPS_FOR_ESTIMATE - 1 :])]
    return median(durations) * max(0, num_steps - step) if durations else None


async def _time_left(connection: AsyncConnection, head: RunHead, config: RunConfig, per_minute: float) -> str:
    """Say how long the rest of the training takes at the pace of the newest steps, or of the rollouts without steps."""
    num_steps = config.training.steps
    if head.state != RunState.RUNNING:
        return head.state
    if 0 < num_steps <= head.step:
        return "all steps are trained"
    times = await times_by_step(connection, head.run_id, head.step - _STEPS_FOR_ESTIMATE, head.step)
    moments = [time.stepped_at.timestamp() for _, time in sorted(times.items()) if time.stepped_at is not None]
    seconds = seconds_left(head.step, num_steps, moments)
    if seconds is None and per_minute:
        num_rollouts = (num_steps - head.step) * config.training.groups_per_step * config.training.group_size
        seconds = num_rollouts / per_minute * 60
    return "" if seconds is None else f"about {duration_in_words(seconds)} left"


async def _held_out(
    connection: AsyncConnection, run_id: str, page: str, rates: Sequence[EvaluationRate] | None
) -> list[Vital]:
    """Compare the first evaluation with the newest one of its temperature, task by task."""
    rates = await evaluation_rates(connection, run_id) if rates is None else rates
    ended = [one for one in rates if one.ended_at is not None and one.num_graded]
    if not ended:
        return []
    first = min(ended, key=lambda one: (one.step, -one.temperature))
    last = max((one for one in ended if one.temperature == first.temperature), key=lambda one: one.step)
    paired = await pair_evaluations(connection, (run_id, first), (run_id, last))
    if paired is None:
        return []
    found, page = paired.difference, f"{page}&evaluation={quote(last.label)}"
    value, told = f"{paired.before:.2f}", f"at step {first.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    if first is not last:
        value += f" → {paired.before + found.mean:.2f}"
        gain = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
        told = f"{gain} from step {first.step} to {last.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    return [Vital("held-out solve rate", value, told, page)]


class _Recent(NamedTuple):
    """`ended_now`: rollouts that ended in the newest ten minutes. `failed`: without a verdict, in the last hour."""

    ended_now: int
    failed: int
    pace: str
    causes: str


async def _read_recent(connection: AsyncConnection, run_id: str) -> _Recent:
    age = seconds_of(func.now() - RolloutTable.ended_at).label("age")
    has_failed = RolloutTable.outcome.in_(FAILED_OUTCOMES)
    newest = (
        select(age, case((has_failed, func.left(RolloutTable.outcome_reason, _CAUSE_CHARS))).label("cause"))
        .where(RolloutTable.run_id == run_id)
        .order_by(RolloutTable.id.desc())
        .limit(_NEWEST_ROLLOUTS)
        .subquery()
    )
    in_last_hour = newest.c.age < _HOUR_SECONDS
    counts = (
        select(
            newest.c.cause,
            func.count().filter(newest.c.age < _NOW_MINUTES * 60).label("now"),
            func.count().filter(in_last_hour).label("hour"),
            func.count().filter(~in_last_hour).label("before"),
        )
        .where(newest.c.age < 2 * _HOUR_SECONDS)
        .group_by(newest.c.cause)
    )
    rows = (await connection.execute(counts)).all()
    failed = sorted((row for row in rows if row.cause is not None), key=lambda row: -row.hour)
    causes = "; ".join(f"{row.hour}: {row.cause}" for row in failed[:_MAX_CAUSES] if row.hour)
    num_failed, num_before = (sum(getattr(row, name) for row in failed) for name in ("hour", "before"))
    told = f"in the last hour, {num_before} in the hour before" + (f". {causes}" if causes else "")
    per_hour = sum(row.hour for row in rows)
    pace = f"in the last ten minutes; {per_hour} ended in the last hour"
    return _Recent(sum(row.now for row in rows), num_failed, pace, told)
