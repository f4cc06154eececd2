"""The facts that say if a run is well: the head of its page, `ratchet status RUN` and `ratchet watch` show the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.durations import duration_in_words
from ratchet.stored_config import read_stored_config
from ratchet.types import FAILED_OUTCOMES, Purpose, RunState, Wish
from reads.curves import StepReward, metrics_by_step, newest_metric_step, rewards_by_step, times_by_step
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.failures import kind_of_error, last_commands
from reads.groups import GroupCount, count_groups_by_progress
from reads.run_comparison import pair_evaluations
from reads.run_tasks import count_tasks
from reads.runs import RunHead, VerdictCount, count_verdicts
from reads.steering import list_requests
from store.columns import seconds_of
from store.open_rollouts import StageCount, count_open_rollouts
from store.runs import ADHOC, newest_version
from store.schema import RolloutTable

_STEPS_FOR_ESTIMATE = 5
_STEPS_SHOWN = 20
_NOW_SECONDS = 600.0
_HOUR_SECONDS = 3600.0
_NEWEST_ROLLOUTS = 5000
"""Rollouts, and such without a verdict, among which the recent ones are counted."""
_CAUSE_CHARS = 60
_MAX_CAUSES = 3
_BARS = "▁▂▃▄▅▆▇█"
TRAINING_REWARD = "training reward"
"""Its name on tiles, curves and tables: the mean over all groups that a step consumed, those without signal too."""


@dataclass(slots=True, frozen=True)
class Vital:
    """One fact about a run. `page`: path in the viewer of what it counts."""

    name: str
    value: str
    detail: str
    page: str

    def sentence(self) -> str:
        return f"{self.name}: {self.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass(slots=True, frozen=True)
class Vitals:
    """The facts that are known, and what they are made of: the run's rollouts and groups, counted."""

    facts: list[Vital]
    waits: list[StageCount]
    verdicts: list[VerdictCount]
    groups: list[GroupCount]


async def read_vitals(
    connection: AsyncConnection,
    head: RunHead,
    rewards: Sequence[StepReward] | None = None,
    rates: Sequence[EvaluationRate] | None = None,
) -> Vitals:
    """`rewards`: of the newest steps, oldest first. What is None is read."""
    waits = await count_open_rollouts(connection, head.run_id)
    verdicts = await count_verdicts(connection, head.run_id)
    groups = await count_groups_by_progress(connection, head.run_id)
    page, rollouts = f"/runs/{quote(head.run_id)}", f"/rollouts?run={quote(head.run_id)}"
    recent = await _read_recent(connection, head)
    found = []
    if head.config_name != ADHOC:
        found += await _training(connection, head, recent.a_minute_now, rewards, rates)
        found += await _signal(connection, head, groups)
    num_ended = sum(one.number for one in verdicts if one.outcome is not None)
    minutes = max(1.0, ((head.ended_at or datetime.now(UTC)) - head.created_at).total_seconds() / 60)
    per_minute = f"{recent.a_minute_in_hour:.1f} in the hour, {num_ended / minutes:.1f} over the run"
    pace = f"in ten minutes, {per_minute}, {num_ended:,} ended"
    found.append(Vital("rollouts a minute", f"{recent.a_minute_now:.1f}", pace, rollouts))
    num_failed = sum(one.number for one in verdicts if one.outcome in FAILED_OUTCOMES)
    lost = f"in the last hour, {recent.failed_before} in the hour before, {num_failed:,} in all"
    lost += await _causes(connection, recent)
    found.append(Vital("without verdict", str(recent.failures.total()), lost, f"{page}#failures"))
    if waits:
        commonest = sorted(waits, key=lambda one: -one.count)
        told = [f"{one.count} {one.stage}, for up to {duration_in_words(one.longest_seconds)}" for one in commonest]
        num_open = str(sum(one.count for one in commonest))
        found.append(Vital("open rollouts", num_open, ", ".join(told), f"{rollouts}&outcome=open"))
    found += [*await _weights(connection, head), await _requests(connection, head)]
    return Vitals(found, waits, verdicts, groups)


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


async def _training(
    connection: AsyncConnection,
    head: RunHead,
    per_minute: float,
    rewards: Sequence[StepReward] | None,
    rates: Sequence[EvaluationRate] | None,
) -> list[Vital]:
    """Return what training has reached. `per_minute`: rollouts that end now."""
    page = f"/runs/{quote(head.run_id)}"
    training = (config := read_stored_config(head.config)).training
    last = await newest_metric_step(connection, head.run_id)
    if rewards is None:
        rewards = await rewards_by_step(connection, head.run_id, last - _STEPS_SHOWN + 1, last)
    left = await _time_left(connection, head, config, per_minute)
    progress = f"{left}{left and ', '}checkpoint at step {head.checkpoint_step}"
    found = [Vital("step", f"{head.step} of {training.steps}", progress, f"{page}#steps")]
    found += await _held_out(connection, head, rates)
    if shown := rewards[-_STEPS_SHOWN:]:
        bars = sparkline([one.mean for one in shown])
        steps = f"{bars} step {shown[0].step} to {shown[-1].step}, all groups that were consumed"
        found.append(Vital(TRAINING_REWARD, f"{shown[-1].mean:.2f}", steps, f"{page}#steps"))
    newest = (await metrics_by_step(connection, head.run_id, last, last)).get(last, {})
    if "staleness_mean" in newest:
        allowed = f"steps on average in step {last}; at most {training.max_staleness} are allowed"
        found.append(Vital("staleness", f"{newest['staleness_mean']:.1f}", allowed, f"{page}#curves"))
    return found


async def _signal(connection: AsyncConnection, head: RunHead, groups: Sequence[GroupCount]) -> list[Vital]:
    num_tasks, num_silent = await count_tasks(connection, head.run_id)
    if not num_tasks:
        return []
    of_training = sorted((one for one in groups if one.purpose == Purpose.TRAIN), key=lambda one: -one.number)
    states = ", ".join(f"{one.number:,} {one.state.replace('_', ' ')}" for one in of_training)
    told = f"no group of these was trained yet; all groups: {states}"
    value = f"{num_silent} of {num_tasks}"
    return [Vital("tasks without signal", value, told, f"/runs/{quote(head.run_id)}/tasks#silent")]


async def _weights(connection: AsyncConnection, head: RunHead) -> list[Vital]:
    """Name the weights of the best step, or the newest, as `init_from` and commands take them."""
    newest = await newest_version(connection, head.run_id)
    if newest is None or not newest.files:
        return []
    best = None if head.best_step is None else await newest_version(connection, head.run_id, head.best_step)
    told = "the newest; no evaluation says which is best"
    if best is not None:
        told = f"the best in evaluations; the newest are {head.run_id}@{newest.step}"
    elif head.best_step is not None:
        told = f"the newest; those of the best step {head.best_step} are deleted"
    ended = "" if head.state in (RunState.RUNNING, RunState.PAUSED) else ", `ratchet evaluate`"
    told += f"; the name is taken by init_from{ended} and `ratchet chat`"
    page = f"/runs/{quote(head.run_id)}/versions"
    return [Vital("weights to go on from", f"{head.run_id}@{(best or newest).step}", told, page)]


async def _requests(connection: AsyncConnection, head: RunHead) -> Vital:
    requests = await list_requests(connection, head.run_id)
    told = ["no person has changed the run"]
    if requests:
        newest = requests[0]
        ago = duration_in_words((datetime.now(UTC) - newest.asked_at).total_seconds())
        reason = f": {newest.reason}" if newest.reason else ""
        told = [f"newest: {newest.what}, by {newest.asked_by} {ago} ago{reason}"]
    if head.wish != Wish.NONE and head.state in (RunState.RUNNING, RunState.PAUSED):
        told.insert(0, f"not done yet: {head.wish}")
    steering = f"/runs/{quote(head.run_id)}/steering"
    return Vital("requests of people", str(len(requests) or "none"), "; ".join(told), steering)


async def _held_out(connection: AsyncConnection, head: RunHead, rates: Sequence[EvaluationRate] | None) -> list[Vital]:
    """Compare the first evaluation with the newest one of its temperature, task by task."""
    rates = await evaluation_rates(connection, head.run_id) if rates is None else rates
    ended = [one for one in rates if one.ended_at is not None and one.num_graded]
    if not ended:
        return []
    first = min(ended, key=lambda one: (one.step, -one.temperature))
    last = max((one for one in ended if one.temperature == first.temperature), key=lambda one: one.step)
    paired = await pair_evaluations(connection, (head.run_id, first), (head.run_id, last))
    if paired is None:
        return []
    found = paired.difference
    page = f"/rollouts?run={quote(head.run_id)}&purpose=eval&evaluation={quote(last.label)}"
    value, told = f"{paired.before:.2f}", f"at step {first.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    if first is not last:
        value += f" → {paired.before + found.mean:.2f}"
        gain = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
        told = f"{gain} from step {first.step} to {last.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    told += "" if head.best_step is None else f"; best at step {head.best_step}"
    return [Vital("held-out mean reward", value, told, page)]


class _Recent(NamedTuple):
    """Rollouts that ended a minute, in the newest ten minutes and in the newest hour; those of the hour without a
    verdict by kind of error, each with the newest id; and how many were without in the hour before. Of a run that has
    ended: before its end."""

    a_minute_now: float
    a_minute_in_hour: float
    failed_before: int
    failures: Counter[str]
    newest: dict[str, int]


async def _read_recent(connection: AsyncConnection, head: RunHead) -> _Recent:
    until = func.now() if head.ended_at is None else literal(head.ended_at)
    age, reason = seconds_of(until - RolloutTable.ended_at).label("age"), RolloutTable.outcome_reason
    of_run = RolloutTable.run_id == head.run_id
    newest = select(age).where(of_run).order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    in_ten, in_sixty = (func.count().filter(newest.c.age < seconds) for seconds in (_NOW_SECONDS, _HOUR_SECONDS))
    ended = select(in_ten, in_sixty, func.count(), func.max(newest.c.age)).select_from(newest)
    now, hour, number, reach = (await connection.execute(ended)).one()
    span = _HOUR_SECONDS if number < _NEWEST_ROLLOUTS else min(_HOUR_SECONDS, max(reach or 0.0, 60.0))
    has_failed = RolloutTable.purpose.in_(list(Purpose)) & RolloutTable.outcome.in_(FAILED_OUTCOMES)
    failed = select(RolloutTable.id, age, func.left(reason, _CAUSE_CHARS).label("cause")).where(of_run, has_failed)
    lost = failed.order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    in_hour = lost.c.age < _HOUR_SECONDS
    since, before = func.count().filter(in_hour), func.count().filter(~in_hour)
    by_cause = (
        select(lost.c.cause, since, before, func.max(lost.c.id).filter(in_hour))
        .where(lost.c.age < 2 * _HOUR_SECONDS)
        .group_by(lost.c.cause)
    )
    failures, ids, failed_before = Counter[str](), dict[str, int](), 0
    for cause, num_since, num_before, rollout_id in await connection.execute(by_cause):
        failed_before += num_before
        if num_since:
            kind = kind_of_error(cause)
            failures[kind] += num_since
            ids[kind] = max(rollout_id, ids.get(kind, 0))
    return _Recent(now * 60 / min(_NOW_SECONDS, span), hour * 60 / span, failed_before, failures, ids)


async def _causes(connection: AsyncConnection, recent: _Recent) -> str:
    """Say the commonest errors, each with its newest rollout and the last command of its agent."""
    commonest = recent.failures.most_common(_MAX_CAUSES)
    commands = await last_commands(connection, [recent.newest[kind] for kind, _ in commonest])
    said = {rollout: f", last command `{command}`" for rollout, command in commands.items() if command}
    newest = [(number, kind, recent.newest[kind]) for kind, number in commonest]
    told = "; ".join(f"{number}: {kind} (rollout {one}{said.get(one, '')})" for number, kind, one in newest)
    return f". {told}" if told else ""
