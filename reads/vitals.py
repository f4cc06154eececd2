"""The facts that say if a run is well: the head of its page, `ratchet status RUN` and `ratchet watch` show the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
from ratchet.lora_slots import versions_of_label
from ratchet.stored_config import read_stored_config
from ratchet.types import FAILED_OUTCOMES, EngineState, Outcome, Purpose, RunState, Wish
from reads.curves import (
    Metrics,
    StepReward,
    metrics_by_step,
    newest_metric_step,
    raised_alarms,
    rewards_by_step,
    times_by_step,
)
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.failures import FailureCluster, cluster_failures, commonest_failure
from reads.groups import GroupCount, count_groups_by_progress
from reads.run_comparison import pair_evaluations
from reads.run_tasks import count_tasks
from reads.runs import FlaggedCount, RunHead, VerdictCount, count_flagged, count_verdicts
from reads.steering import list_requests
from store.columns import seconds_of
from store.engines import SILENT_SECONDS, EngineRow, list_engines
from store.open_rollouts import StageCount, count_open_rollouts
from store.runs import ADHOC, newest_version
from store.schema import PolicyVersionTable, RolloutTable

_STEPS_FOR_ESTIMATE = 5
_STEPS_SHOWN = 20
_NOW_SECONDS = 600.0
_HOUR_SECONDS = 3600.0
_NEWEST_ROLLOUTS = 5000
"""Rollouts, and such without a verdict, among which the recent ones are counted."""
_MAX_FAILURES = 10
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
    """The facts, and what they are made of. `failures`: the ten largest clusters of each kind."""

    facts: list[Vital]
    waits: list[StageCount]
    verdicts: list[VerdictCount]
    groups: list[GroupCount]
    failures: list[FailureCluster]
    flagged: FlaggedCount
    engines: list[EngineRow]


def clock_time(moment: datetime | None) -> str:
    """Return the time in UTC to the second, as ISO 8601 writes it; empty for None."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


async def read_vitals(
    connection: AsyncConnection,
    head: RunHead,
    rewards: Sequence[StepReward] | None = None,
    rates: Sequence[EvaluationRate] | None = None,
    metrics: Mapping[int, Metrics] | None = None,
) -> Vitals:
    """`rewards`, `metrics`: of the newest steps, oldest first. What is None is read."""
    if metrics is None:
        last = await newest_metric_step(connection, head.run_id)
        metrics = await metrics_by_step(connection, head.run_id, last - _STEPS_SHOWN + 1, last)
    recent = await _read_recent(connection, head)
    found = Vitals(
        facts=[_times(head, recent)],
        waits=await count_open_rollouts(connection, head.run_id),
        verdicts=await count_verdicts(connection, head.run_id),
        groups=await count_groups_by_progress(connection, head.run_id),
        failures=await cluster_failures(connection, head.run_id, _MAX_FAILURES),
        flagged=await count_flagged(connection, head.run_id),
        engines=await list_engines(connection, head.engine_set),
    )
    page, rollouts = f"/runs/{quote(head.run_id)}", f"/rollouts?run={quote(head.run_id)}"
    newest = await newest_version(connection, head.run_id)
    facts, is_by_hand = found.facts, head.config_name == ADHOC
    if not is_by_hand:
        facts += await _training(connection, head, recent, found.verdicts, rewards, metrics)
        facts.append(await _held_out(connection, head, rates))
        facts += await _signal(connection, head, found.groups)
    facts += [
        _solved(found.verdicts, is_by_hand, rollouts),
        *_pace(found, recent, rollouts),
        *_failed(found, recent, f"{page}#failures"),
        _engines(head, found.engines, newest),
    ]
    if not is_by_hand:
        facts += [_alarms(metrics, f"{page}#curves"), await _weights(connection, head, newest)]
    facts.append(await _requests(connection, head))
    return found


def _times(head: RunHead, recent: "_Recent") -> Vital:
    took, ended = duration_in_words(recent.run_seconds), clock_time(head.ended_at)
    told = f"ended {ended}, {took} later" if ended else f"{took} ago; it has not ended"
    return Vital("began", clock_time(head.created_at), told, f"/runs/{quote(head.run_id)}#more")


def _solved(verdicts: Sequence[VerdictCount], is_by_hand: bool, page: str) -> Vital:
    words = {Purpose.EVAL: "by hand"} if is_by_hand else {Purpose.TRAIN: "training", Purpose.EVAL: "evaluation"}
    told = [f"{name} {_solved_of(verdicts, [purpose])}" for purpose, name in words.items()]
    return Vital("solved", _solved_of(verdicts), f"{', '.join(told)}; reward of at least 1", f"{page}&reward_from=1")


def _solved_of(verdicts: Sequence[VerdictCount], purposes: Sequence[str] = tuple(Purpose)) -> str:
    judged = [(one.reward, one.number) for one in verdicts if one.purpose in purposes and one.reward is not None]
    num_solved = sum(number for reward, number in judged if reward >= 1)
    return f"{num_solved:,} of {sum(number for _, number in judged):,}"


def _pace(found: Vitals, recent: "_Recent", page: str) -> list[Vital]:
    """Return how many rollouts are open, and how many end. A rate is over no more than the time since the run began."""
    commonest = sorted(found.waits, key=lambda one: -one.count)
    told = [f"{one.count} {one.stage}, for up to {duration_in_words(one.longest_seconds)}" for one in commonest]
    num_open, stages = sum(one.count for one in commonest), ", ".join(told) or "none is in flight"
    is_open = Vital("open rollouts", str(num_open), stages, f"{page}&outcome=open")
    num_ended = sum(one.number for one in found.verdicts if one.outcome is not None)
    over_run = _rate(num_ended * 60 / max(60.0, recent.run_seconds))
    pace = f"newest {duration_in_words(recent.seconds)}; over the run {over_run}, {num_ended:,} rollouts"
    return [is_open, Vital("pace", _rate(recent.a_minute), pace, page)]


def _rate(a_minute: float) -> str:
    return f"{a_minute:.1f} a minute" if a_minute >= 1 else f"{60 * a_minute:.1f} an hour"


def _failed(found: Vitals, recent: "_Recent", page: str) -> list[Vital]:
    """Return what ended without a verdict, what was judged and not solved, and what looks like cheating."""
    num_lost = sum(one.number for one in found.verdicts if one.outcome in FAILED_OUTCOMES)
    before = f"{recent.failed_before} in the hour before, " if recent.run_seconds > _HOUR_SECONDS else ""
    lost = [one for one in found.failures if not one.what.startswith(Outcome.REJECTED)]
    told = f"{before}{num_lost:,} in all; {commonest_failure(lost, 'error')}"
    clues = "; ".join(commonest_failure(found.failures, kind) for kind in ("test", "command"))
    num_unsolved = sum(one.number for one in found.verdicts if one.reward is not None and one.reward < 1)
    flagged = found.flagged
    others = f"; {flagged.num_others} more flagged by verdicts that decided no reward" if flagged.num_others else ""
    value = f"{flagged.num_rejected} rejected, {flagged.num_flagged} flagged"
    return [
        Vital("without verdict", f"{recent.failed} in the last hour", told, page),
        Vital("unsolved", f"{num_unsolved:,}", clues, page),
        Vital("patches", value, f"by rules against cheating{others}", page.replace("#failures", "#flagged")),
    ]


def _engines(head: RunHead, engines: Sequence[EngineRow], newest: PolicyVersionTable | None) -> Vital:
    """Count the engines of the run's set that serve its newest weights, and name those that are not well."""
    version = None if newest is None else newest.version
    current = [one for one in engines if version in (versions_of_label(one.version).values() or [None])]
    states = Counter(str(one.state) for one in engines if one.state is not EngineState.READY)
    told = [version or "the initial weights", *(f"{number} {state}" for state, number in states.items())]
    if silent := [one.silent_seconds for one in engines if one.silent_seconds >= SILENT_SECONDS]:
        told.append(f"{len(silent)} silent for {duration_in_words(max(silent))}")
    told += ["all answer"] if engines and len(told) == 1 else []
    told += ["the run has ended"] if head.ended_at is not None else []
    value = f"{len(current)} of {len(engines)} on the newest weights" if engines else "no engine runs"
    return Vital("engines", value, ", ".join(told), f"/runs/{quote(head.run_id)}#more")


def _alarms(metrics: Mapping[int, Metrics], page: str) -> Vital:
    raised = raised_alarms({step: metrics[step] for step in sorted(metrics)[-_STEPS_SHOWN:]})
    num_current = sum(one.is_current for one in raised)
    told = [f"{one.name.replace('_', ' ')} in step {', '.join(map(str, one.steps[:3]))}" for one in raised]
    told = told or [f"none in the {_STEPS_SHOWN} steps before"]
    entropies = [metrics[step]["entropy"] for step in sorted(metrics) if "entropy" in metrics[step]]
    told += [f"entropy {one:.2g} nats" for one in entropies[-1:]]
    value = f"{num_current} in the newest step" if num_current else "none in the newest step"
    return Vital("alarms", value, "; ".join(told), page)


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
    recent: "_Recent",
    verdicts: Sequence[VerdictCount],
    rewards: Sequence[StepReward] | None,
    metrics: Mapping[int, Metrics],
) -> list[Vital]:
    """Return what training has reached."""
    page, last = f"/runs/{quote(head.run_id)}", max(metrics, default=0)
    training = (config := read_stored_config(head.config)).training
    if rewards is None:
        rewards = await rewards_by_step(connection, head.run_id, last - _STEPS_SHOWN + 1, last)
    left = await _time_left(connection, head, config, recent.a_minute)
    size = f"{training.groups_per_step} groups × {training.group_size} rollouts each"
    told = ", ".join(filter(None, [left, size, f"saved at step {head.checkpoint_step}"]))
    found = [Vital("step", f"{head.step} of {training.steps}", told, f"{page}#steps")]
    value, told = "none yet", "no step is trained"
    if rewards:
        first, newest = rewards[0], rewards[-1]
        if first.step > 1:
            first = next(iter(await rewards_by_step(connection, head.run_id, 1, 1)), first)
        value = f"{newest.mean:.2f} in step {newest.step}"
        before = "its first value; " if first is newest else f"{first.mean:.2f} in step {first.step}; "
        told = f"{before}{_solved_of(verdicts, [Purpose.TRAIN])} solved over the run"
    found.append(Vital(TRAINING_REWARD, value, told, f"{page}#curves"))
    if "staleness_mean" in (newest_metrics := metrics.get(last, {})):
        allowed = f"mean of the tokens of step {last}; at most {training.max_staleness} are allowed"
        found.append(Vital("staleness", f"{newest_metrics['staleness_mean']:.1f} steps", allowed, f"{page}#curves"))
    return found


async def _signal(connection: AsyncConnection, head: RunHead, groups: Sequence[GroupCount]) -> list[Vital]:
    num_tasks, num_silent = await count_tasks(connection, head.run_id)
    if not num_tasks:
        return []
    of_training = sorted((one for one in groups if one.purpose == Purpose.TRAIN), key=lambda one: -one.number)
    states = ", ".join(f"{one.number:,} {one.state.replace('_', ' ')}" for one in of_training)
    told = f"none of their groups trained; all groups: {states}"
    page = f"/runs/{quote(head.run_id)}/tasks#silent"
    return [Vital("tasks without signal", f"{num_silent} of {num_tasks}", told, page)]


async def _weights(connection: AsyncConnection, head: RunHead, newest: PolicyVersionTable | None) -> Vital:
    """Name the weights of the best step, or the newest, as `init_from` and commands take them."""
    name, page = "weights to go on from", f"/runs/{quote(head.run_id)}/versions"
    if newest is None or not newest.files:
        return Vital(name, "none yet", "no version with files is published", page)
    best = None if head.best_step is None else await newest_version(connection, head.run_id, head.best_step)
    told = "the newest; no evaluation says which is best"
    if best is not None:
        told = f"the best in evaluations; newest: {head.run_id}@{newest.step}"
    elif head.best_step is not None:
        told = f"the newest; those of the best step {head.best_step} are deleted"
    return Vital(name, f"{head.run_id}@{(best or newest).step}", told, page)


async def _requests(connection: AsyncConnection, head: RunHead) -> Vital:
    requests = await list_requests(connection, head.run_id)
    told = ["no person has changed the run"]
    if requests:
        newest = requests[0]
        told = [f"newest: {newest.what}, at {clock_time(newest.asked_at)}"]
    if head.wish != Wish.NONE and head.state in (RunState.RUNNING, RunState.PAUSED):
        told.insert(0, f"not done yet: {head.wish}")
    steering = f"/runs/{quote(head.run_id)}/steering"
    return Vital("changes by people", str(len(requests) or "none"), "; ".join(told), steering)


async def _held_out(connection: AsyncConnection, head: RunHead, rates: Sequence[EvaluationRate] | None) -> Vital:
    """Compare the first evaluation with the newest one of its temperature, task by task."""
    name, page = "held-out mean reward", f"/rollouts?run={quote(head.run_id)}&purpose=eval"
    rates = await evaluation_rates(connection, head.run_id) if rates is None else rates
    ended = [one for one in rates if one.ended_at is not None and one.num_graded]
    first = min(ended, key=lambda one: (one.step, -one.temperature), default=None)
    if first is None:
        return Vital(name, "none yet", "no evaluation has ended", page)
    last = max((one for one in ended if one.temperature == first.temperature), key=lambda one: one.step)
    paired = await pair_evaluations(connection, (head.run_id, first), (head.run_id, last))
    if paired is None:
        return Vital(name, "not comparable", f"steps {first.step} and {last.step} share no task with verdicts", page)
    found = paired.difference
    value, told = f"{paired.before:.2f}", f"at step {first.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    if first is not last:
        value += f" → {paired.before + found.mean:.2f}"
        gain = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}] (95%)"
        told = f"{gain} from step {first.step} to {last.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    told += "" if head.best_step is None else f"; best at step {head.best_step}"
    return Vital(name, value, told, f"{page}&evaluation={quote(last.label)}")


class _Recent(NamedTuple):
    """Rollouts that ended a minute, over the newest `seconds`, ten minutes or less; how many of the newest hour and of
    the hour before were without a verdict. Of a run that has ended: before its end. `run_seconds`: since it began."""

    a_minute: float
    seconds: float
    run_seconds: float
    failed: int
    failed_before: int


async def _read_recent(connection: AsyncConnection, head: RunHead) -> _Recent:
    until = func.now() if head.ended_at is None else literal(head.ended_at)
    age, of_run = seconds_of(until - RolloutTable.ended_at).label("age"), RolloutTable.run_id == head.run_id
    newest = select(age).where(of_run).order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    ended = select(func.count().filter(newest.c.age < _NOW_SECONDS), func.count(), func.max(newest.c.age))
    num_now, number, reach = (await connection.execute(ended.select_from(newest))).one()
    run_seconds = ((head.ended_at or datetime.now(UTC)) - head.created_at).total_seconds()
    looked_at = run_seconds if number < _NEWEST_ROLLOUTS else reach or 0.0
    seconds = max(60.0, min(_NOW_SECONDS, run_seconds, looked_at))
    has_failed = RolloutTable.purpose.in_(list(Purpose)) & RolloutTable.outcome.in_(FAILED_OUTCOMES)
    lost = select(age).where(of_run, has_failed).order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    in_one, in_two = (func.count().filter(lost.c.age < hours * _HOUR_SECONDS) for hours in (1, 2))
    failed, num_in_two = (await connection.execute(select(in_one, in_two).select_from(lost))).one()
    return _Recent(num_now * 60 / seconds, seconds, run_seconds, failed, num_in_two - failed)
