"""The facts that say if a run is well: the head of its page, `ratchet status RUN` and `ratchet watch` show the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.durations import duration_in_words
from ratchet.lora_slots import versions_of_label
from ratchet.stored_config import read_stored_config
from ratchet.types import FAILED_OUTCOMES, OPEN_STATES, EngineState, Purpose, RunState, Wish
from reads.curves import Metrics, StepReward, metrics_by_step, newest_metric_step, raised_alarms, rewards_by_step
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.failures import HOUR_SECONDS, Failures, cluster_failures
from reads.groups import GroupCount, count_groups_by_progress
from reads.recall import retrained_runs
from reads.run_comparison import pair_evaluations
from reads.run_tasks import count_tasks
from reads.runs import FlaggedCount, RunHead, VerdictCount, count_flagged, count_verdicts
from reads.steering import list_requests
from reads.time_left import read_seconds_left
from store import learners
from store.columns import seconds_of
from store.engines import SILENT_SECONDS, EngineRow, list_engines
from store.evaluations import MIN_VERDICTS
from store.open_rollouts import StageCount, count_open_rollouts
from store.runs import newest_version
from store.schema import CheckpointTable, PolicyVersionTable, RolloutTable

_STEPS_SHOWN = 20
_NOW_SECONDS = 600.0
_LONG_SECONDS = 60.0
_NEWEST_ROLLOUTS = 5000
"""Rollouts, and such without a verdict, among which the recent ones are counted."""
_MAX_FAILURES = 10
_UPDATE_FIGURES = {
    "grad_norm": "gradient norm {:.3g}",
    "trained_tokens": "{:,.0f} tokens",
    "masked_fraction": "{:.1%} masked",
}
_BARS = "▁▂▃▄▅▆▇█"
WAITS_FOR = "waits for"
TRAINING_REWARD = "training reward"
"""Its name on tiles, curves and tables: the mean over all groups that a step consumed, those without signal too."""


@dataclass(slots=True, frozen=True)
class Vital:
    """One fact about a run. `page`: path in the viewer of what it counts. `curve`: its newest values as a sparkline,
    oldest first; empty without two."""

    name: str
    value: str
    detail: str
    page: str
    curve: str = ""

    def sentence(self) -> str:
        value = " ".join(filter(None, [self.value, self.curve]))
        return f"{self.name}: {value}" + (f" ({self.detail})" if self.detail else "")


@dataclass(slots=True, frozen=True)
class Vitals:
    """The facts, and what they are made of. `failures`: the ten largest clusters of each kind."""

    facts: list[Vital]
    waits: list[StageCount]
    verdicts: list[VerdictCount]
    groups: list[GroupCount]
    failures: Failures
    flagged: FlaggedCount
    engines: list[EngineRow]


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each of the newest values, from the lowest to the highest of them; empty for fewer than two."""
    shown = values[-_STEPS_SHOWN:]
    if len(shown) < 2:
        return ""
    low, width = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((len(_BARS) - 1) * (one - low) / (width or 1.0))] for one in shown)


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
    run_id, is_by_hand = head.run_id, head.is_by_hand
    last = await newest_metric_step(connection, run_id) if metrics is None else max(metrics, default=0)
    if metrics is None:
        metrics = await metrics_by_step(connection, run_id, last - _STEPS_SHOWN + 1, last)
    if rewards is None:
        rewards = await rewards_by_step(connection, run_id, last - _STEPS_SHOWN + 1, last)
    rates = await evaluation_rates(connection, run_id) if rates is None else rates
    recent, newest = await _read_recent(connection, head), await newest_version(connection, run_id)
    found = Vitals(
        facts=[],
        waits=await count_open_rollouts(connection, run_id),
        verdicts=await count_verdicts(connection, run_id),
        groups=await count_groups_by_progress(connection, run_id),
        failures=await cluster_failures(connection, run_id, _MAX_FAILURES, head.ended_at),
        flagged=await count_flagged(connection, run_id),
        engines=await list_engines(connection, head.engine_set),
    )
    page, rollouts = f"/runs/{quote(run_id)}", f"/rollouts?run={quote(run_id)}"
    config, facts = read_stored_config(head.config), found.facts
    head = replace(head, best_step=_best_step(head, config, rates))
    if not is_by_hand:
        facts += [
            _trains(config, f"{page}#more"),
            await _step(connection, head, config, rates, recent),
            await _held_out(connection, head, rates),
            await _training_reward(connection, head, found.verdicts, rewards),
        ]
    facts += [_pace(head, found, recent, rollouts), _without_verdict(found, recent, f"{page}#failures")]
    if not is_by_hand and "staleness_mean" in metrics.get(last, {}):
        allowed = f"mean of the tokens of step {last}; at most {config.training.max_staleness} are allowed"
        value = f"{metrics[last]['staleness_mean']:.1f} steps"
        facts.append(Vital("staleness", value, allowed, f"{page}#curves"))
    ended = recent.newest_ended if head.ended_at is None else None
    told = "" if ended is None else f"the newest rollout ended {duration_in_words(ended)} ago"
    facts += [
        Vital(WAITS_FOR, await _waits_for(connection, head, found.waits, rates), told, f"{rollouts}&outcome=open"),
        _open_rollouts(found.waits, f"{rollouts}&outcome=open"),
        _engines(head, found.engines, newest),
    ]
    if not is_by_hand:
        facts.append(_alarms(metrics, f"{page}#curves"))
    facts += [_solved(found.verdicts, is_by_hand, rollouts), *_unsolved(found, f"{page}#failures")]
    if not is_by_hand:
        facts.append(_learning_rate(metrics, config, f"{page}#curves"))
        facts += await _signal(connection, head, found.groups)
        facts.append(await _weights(connection, head, newest))
    again = await retrained_runs(connection, run_id)
    facts += [Vital("trained again", str(len(again)), "; ".join(again), f"{page}#more")] if again else []
    facts += [await _requests(connection, head), _times(head, recent)]
    return found


def _trains(config: RunConfig, page: str) -> Vital:
    model = " from ".join(filter(None, [Path(config.model).name, config.init_from]))
    paths = [(Path(one.path), " (held out)" * (one.use == "eval")) for one in config.datasets]
    datasets = ", ".join(dict.fromkeys(f"{path.parent.name}/{path.stem}{held_out}" for path, held_out in paths))
    told = f"datasets {datasets}; loss {config.loss.preset}, advantage {config.training.advantage}"
    return Vital("model", model, told, page)


async def _waits_for(
    connection: AsyncConnection, head: RunHead, waits: Sequence[StageCount], rates: Sequence[EvaluationRate]
) -> str:
    """Return what the run waits for, as far as the store says."""
    if head.state != RunState.RUNNING:
        reason = f": {head.state_reason}" if head.state_reason else ""
        said = head.state_reason if head.state_reason.startswith(head.state) else f"it is {head.state}{reason}"
        if head.state == RunState.PAUSED:
            return f"{said}; `ratchet resume {head.run_id}` lets it go on"
        since = f" since {clock_time(head.ended_at)}" if head.ended_at else ""
        return f"nothing{since}: {said}"
    if head.wish != Wish.NONE:
        return f"a person has asked it to {head.wish}; `ratchet show requests {head.run_id}` says who"
    if head.state_reason:  # why a running run starts no new groups
        return head.state_reason
    labels = ", ".join(one.label for one in rates if one.ended_at is None)
    evaluation = f"evaluation {labels}, during which no step begins" if labels else ""
    if waits and waits[0].longest_seconds > _LONG_SECONDS:
        slowest, longest = waits[0], duration_in_words(waits[0].longest_seconds)
        found = f"the slowest of {slowest.count} rollouts: {slowest.stage} for {longest}"
        return f"{evaluation}; {found}" if evaluation else found
    if 0 < read_stored_config(head.config).training.steps <= head.step and waits:
        num_open = sum(stage.count for stage in waits)
        return f"the last evaluation: all steps are trained, and {num_open} of its rollouts are open"
    if not waits and (learner := await learners.get_learner(connection, head.run_id)) is not None:
        silent = duration_in_words(learner.silent_seconds)
        return f"the learner: {learner.phase} {learner.step}, heartbeat {silent} ago"
    return evaluation or "nothing: rollouts go on"


def _times(head: RunHead, recent: "_Recent") -> Vital:
    took, ended = duration_in_words(recent.run_seconds), clock_time(head.ended_at)
    told = f"ended {ended}, {took} later" if ended else f"{took} ago; it has not ended"
    return Vital("began", clock_time(head.created_at), told, f"/runs/{quote(head.run_id)}#more")


def _solved(verdicts: Sequence[VerdictCount], is_by_hand: bool, page: str) -> Vital:
    words = {Purpose.EVAL: "by hand"} if is_by_hand else {Purpose.TRAIN: "training", Purpose.EVAL: "all evaluations"}
    told = [f"{name} {_solved_of(verdicts, [purpose])}" for purpose, name in words.items()]
    return Vital("solved", _solved_of(verdicts), f"{', '.join(told)}; reward of at least 1", f"{page}&reward_from=1")


def _solved_of(verdicts: Sequence[VerdictCount], purposes: Sequence[str] = tuple(Purpose)) -> str:
    judged = [(one.reward, one.number) for one in verdicts if one.purpose in purposes and one.reward is not None]
    num_solved = sum(number for reward, number in judged if reward >= 1)
    return f"{num_solved:,} of {sum(number for _, number in judged):,}"


def _open_rollouts(waits: Sequence[StageCount], page: str) -> Vital:
    commonest = sorted(waits, key=lambda one: -one.count)
    told = [f"{one.count} {one.stage}, for up to {duration_in_words(one.longest_seconds)}" for one in commonest]
    num_open = sum(one.count for one in commonest)
    return Vital("open rollouts", str(num_open), ", ".join(told) or "none is in flight", page)


def _pace(head: RunHead, found: Vitals, recent: "_Recent", page: str) -> Vital:
    """Return how many rollouts end. A rate is over no more than the time since the run began."""
    num_ended = sum(one.number for one in found.verdicts if one.outcome is not None)
    over_run = _rate(num_ended * 60 / max(60.0, recent.run_seconds))
    value, during = _rate(recent.a_minute), duration_in_words(recent.seconds)
    if head.ended_at is not None:
        told = f"{num_ended:,} rollouts; last {during}: {value}"
        return Vital("pace", f"{over_run} over the run", told, page)
    return Vital("pace", value, f"newest {during}; over the run {over_run}, {num_ended:,} rollouts", page)


def _rate(a_minute: float) -> str:
    return f"{a_minute:.1f} a minute" if a_minute >= 1 else f"{60 * a_minute:.1f} an hour"


def _without_verdict(found: Vitals, recent: "_Recent", page: str) -> Vital:
    num_lost = sum(one.number for one in found.verdicts if one.outcome in FAILED_OUTCOMES)
    before = f"{recent.failed_before} in the hour before, " if recent.run_seconds > HOUR_SECONDS else ""
    told = f"{before}{num_lost:,} in all; {found.failures.commonest_error()}"
    return Vital("without verdict", f"{recent.failed} in the {found.failures.hour}", told, page)


def _unsolved(found: Vitals, page: str) -> list[Vital]:
    """Return what was judged and not solved, why, which patches were empty, and what looks like cheating."""
    failures, flagged = found.failures, found.flagged
    clues = "; ".join(failures.commonest_causes()) or "no failed test or last command is shared"
    num_unsolved = sum(one.number for one in found.verdicts if one.reward is not None and one.reward < 1)
    others = f"{flagged.num_others} more flagged by verdicts that decided no reward" if flagged.num_others else ""
    value = f"{flagged.num_rejected} rejected, {flagged.num_flagged} flagged, {failures.num_empty}"
    value += f" of newest {failures.num_unsolved} unsolved empty" if failures.num_unsolved else " empty"
    return [
        Vital("unsolved", f"{num_unsolved:,}", clues, page),
        Vital("patches", value, others or "integrity rules" * (len(value) <= 52), page),
    ]


def _engines(head: RunHead, engines: Sequence[EngineRow], newest: PolicyVersionTable | None) -> Vital:
    """Count the engines of the run's set that answer, and those on its newest weights; name those that are not well."""
    version = None if newest is None else newest.version
    current = [one for one in engines if version in (versions_of_label(one.version).values() or [None])]
    states = Counter(str(one.state) for one in engines if one.state is not EngineState.READY)
    told = [f"{len(current)} on newest weights {version.rpartition('/')[2] if version else '(initial)'}"]
    told += [f"{number} {state}" for state, number in states.items()]
    if silent := [one.silent_seconds for one in engines if one.silent_seconds >= SILENT_SECONDS]:
        told.append(f"{len(silent)} silent for {duration_in_words(max(silent))}")
    told += ["the run has ended"] if head.ended_at is not None else []
    num_answering = sum(one.reachable for one in engines)
    value = f"{num_answering} of {len(engines)} answer{'s' * (num_answering == 1)}" if engines else "no engine runs"
    return Vital("engines", value, ", ".join(told), f"/runs/{quote(head.run_id)}#more")


def _alarms(metrics: Mapping[int, Metrics], page: str) -> Vital:
    shown = {step: metrics[step] for step in sorted(metrics)[-_STEPS_SHOWN:]}
    raised, before = raised_alarms(shown), len(shown) - 1
    num_current = sum(one.is_current for one in raised)
    told = [f"{one.name.replace('_', ' ')} in step {', '.join(map(str, one.steps[:3]))}" for one in raised]
    if not told and before > 0:
        told = [f"none in the {before} before"]
    entropies = [metrics[step]["entropy"] for step in sorted(metrics) if "entropy" in metrics[step]]
    told += [f"entropy {one:.2g} nats" for one in entropies[-1:]]
    value = f"{num_current} in the newest step" if num_current else "none in the newest step"
    return Vital("alarms", value, "; ".join(told), page)


def _learning_rate(metrics: Mapping[int, Metrics], config: RunConfig, page: str) -> Vital:
    """Return the learning rate of the newest trained step, or of the config, with the size of the step's update."""
    step = max(metrics, default=0)
    newest = metrics[step] if step else {}
    rate = newest.get("learning_rate", config.training.learning_rate)
    told = ", ".join(words.format(newest[name]) for name, words in _UPDATE_FIGURES.items() if name in newest)
    return Vital("learning rate", f"{rate:g}", told, page)


async def _time_left(
    connection: AsyncConnection, head: RunHead, config: RunConfig, rates: Sequence[EvaluationRate], per_minute: float
) -> str:
    """Say how long the rest of the run takes, evaluations included."""
    if head.state != RunState.RUNNING:
        return head.state
    seconds = await read_seconds_left(connection, head.run_id, config, head.step, rates, per_minute)
    trained = "all steps are trained" if 0 < config.training.steps <= head.step else ""
    return ", ".join(filter(None, [trained, f"about {duration_in_words(seconds)} left" if seconds else ""]))


async def _step(
    connection: AsyncConnection, head: RunHead, config: RunConfig, rates: Sequence[EvaluationRate], recent: "_Recent"
) -> Vital:
    training = config.training
    left = await _time_left(connection, head, config, rates, recent.a_minute)
    size = f"{training.groups_per_step} groups × {training.group_size} rollouts each"
    key = (CheckpointTable.run_id == head.run_id, CheckpointTable.step == head.checkpoint_step)
    saved_at = (await connection.execute(select(CheckpointTable.created_at).where(*key))).scalar_one_or_none()
    saved = f"saved at step {head.checkpoint_step}" + (f", {clock_time(saved_at)}" if saved_at else "")
    told = ", ".join(filter(None, [left, size, saved]))
    return Vital("step", f"{head.step} of {training.steps}", told, f"/runs/{quote(head.run_id)}#steps")


async def _training_reward(
    connection: AsyncConnection, head: RunHead, verdicts: Sequence[VerdictCount], rewards: Sequence[StepReward]
) -> Vital:
    value, told = "none yet", "no step is trained"
    if rewards:
        first, newest = rewards[0], rewards[-1]
        if first.step > 1:
            first = next(iter(await rewards_by_step(connection, head.run_id, 1, 1)), first)
        value = f"{newest.mean:.2f} in step {newest.step}"
        before = "its first value; " if first is newest else f"{first.mean:.2f} in step {first.step}; "
        told = f"{before}{_solved_of(verdicts, [Purpose.TRAIN])} solved over the run"
    curve = sparkline([one.mean for one in rewards])
    return Vital(TRAINING_REWARD, value, told, f"/runs/{quote(head.run_id)}#curves", curve)


async def _signal(connection: AsyncConnection, head: RunHead, groups: Sequence[GroupCount]) -> list[Vital]:
    num_tasks, num_silent = await count_tasks(connection, head.run_id)
    if not num_tasks:
        return []
    of_training = sorted((one for one in groups if one.purpose == Purpose.TRAIN), key=lambda one: -one.number)
    states = ", ".join(f"{one.number:,} {one.state.replace('_', ' ')}" for one in of_training)
    page = f"/runs/{quote(head.run_id)}/tasks#silent"
    return [Vital("tasks without signal", f"{num_silent} of {num_tasks}", f"groups: {states}", page)]


def _best_step(head: RunHead, config: RunConfig, rates: Sequence[EvaluationRate]) -> int | None:
    """Return the best step; None if only evaluations of the initial weights have been compared."""
    alike = [one for one in rates if one.ended_at and one.temperature in config.evaluation.temperatures[:1]]
    has_rival = any(one.step and 0 < one.num_graded >= MIN_VERDICTS * one.num_rollouts for one in alike)
    return head.best_step if head.best_step or has_rival else None


async def _weights(connection: AsyncConnection, head: RunHead, newest: PolicyVersionTable | None) -> Vital:
    """Name the weights of the best step, or the newest, as `init_from` and commands take them."""
    name, page = "weights to go on from", f"/runs/{quote(head.run_id)}/versions"
    if newest is None or not newest.files:
        return Vital(name, "none yet", "no version with files is published", page)
    best = None if head.best_step is None else await newest_version(connection, head.run_id, head.best_step)
    told = "the newest; no evaluation says which is best"
    if best is not None:
        told = f"the best in evaluations; newest: {head.run_id}@{newest.step}"
    elif head.best_step:
        told = f"the newest; those of the best step {head.best_step} are deleted"
    return Vital(name, f"{head.run_id}@{(best or newest).step}", told, page)


async def _requests(connection: AsyncConnection, head: RunHead) -> Vital:
    requests = await list_requests(connection, head.run_id)
    told = ["no person has changed the run"]
    if requests:
        told = [f"{requests[0].what}, {clock_time(requests[0].asked_at)}"]
    if head.wish != Wish.NONE and head.state in OPEN_STATES:
        told.insert(0, f"not done yet: {head.wish}")
    steering = f"/runs/{quote(head.run_id)}/steering"
    return Vital("changes by people", str(len(requests) or "none"), "; ".join(told), steering)


async def _held_out(connection: AsyncConnection, head: RunHead, rates: Sequence[EvaluationRate]) -> Vital:
    """Compare the first evaluation with the newest one of its temperature, task by task."""
    name, page = "held-out mean reward", f"/rollouts?run={quote(head.run_id)}&purpose=eval"
    ended = [one for one in rates if one.ended_at is not None and one.num_graded]
    first = min(ended, key=lambda one: (one.step, -one.temperature), default=None)
    if first is None:
        return Vital(name, "none yet", "no evaluation has ended", page)
    alike = sorted((one for one in ended if one.temperature == first.temperature), key=lambda one: one.step)
    last = max(alike, key=lambda one: one.step)
    paired = await pair_evaluations(connection, (head.run_id, first), (head.run_id, last))
    if paired is None:
        return Vital(name, "not comparable", f"steps {first.step} and {last.step} share no task with verdicts", page)
    found = paired.difference
    value, told = f"{paired.before:.2f}", f"at step {first.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    if first is not last:
        value += f" → {paired.after.mean:.2f} [{paired.after.low:.2f}, {paired.after.high:.2f}]"
        gain = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}] (95% intervals)"
        told = f"{gain} from step {first.step} to {last.step}, {found.num_tasks} tasks, T={first.temperature:g}"
    told += "" if head.best_step is None else f"; best at step {head.best_step}"
    curve = sparkline([one.mean for one in alike if one.mean is not None])
    return Vital(name, value, told, f"{page}&evaluation={quote(last.label)}", curve)


class _Recent(NamedTuple):
    """Rollouts that ended a minute, over the newest `seconds`, ten minutes or less; how many of the newest hour and of
    the hour before were without a verdict. Of a run that has ended: before its end. `run_seconds`: since it began.
    `newest_ended`: seconds since the newest rollout ended, None if none has."""

    a_minute: float
    seconds: float
    run_seconds: float
    failed: int
    failed_before: int
    newest_ended: float | None


async def _read_recent(connection: AsyncConnection, head: RunHead) -> _Recent:
    until = func.now() if head.ended_at is None else literal(head.ended_at)
    age, of_run = seconds_of(until - RolloutTable.ended_at).label("age"), RolloutTable.run_id == head.run_id
    newest = select(age).where(of_run).order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    ended = select(
        func.count().filter(newest.c.age < _NOW_SECONDS), func.count(), func.max(newest.c.age), func.min(newest.c.age)
    )
    num_now, number, reach, newest_ended = (await connection.execute(ended.select_from(newest))).one()
    run_seconds = ((head.ended_at or datetime.now(UTC)) - head.created_at).total_seconds()
    looked_at = run_seconds if number < _NEWEST_ROLLOUTS else reach or 0.0
    seconds = max(60.0, min(_NOW_SECONDS, run_seconds, looked_at))
    has_failed = RolloutTable.purpose.in_(list(Purpose)) & RolloutTable.outcome.in_(FAILED_OUTCOMES)
    lost = select(age).where(of_run, has_failed).order_by(RolloutTable.id.desc()).limit(_NEWEST_ROLLOUTS).subquery()
    in_one, in_two = (func.count().filter(lost.c.age < hours * HOUR_SECONDS) for hours in (1, 2))
    failed, num_in_two = (await connection.execute(select(in_one, in_two).select_from(lost))).one()
    return _Recent(num_now * 60 / seconds, seconds, run_seconds, failed, num_in_two - failed, newest_ended)
