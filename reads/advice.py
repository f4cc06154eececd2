"""The hours of a run by what they were spent on, what a trained token costs, and which setting would change it most.

Every rollout that a step consumed is followed from the moment that its group was made until the weights it has helped
to make are in the engines; each second of that is given to one phase, so the phases add up to the rollout-hours.

A rollout that waits for others, in its group or in its step, does nothing by itself. Such a second is shown under
"waiting for the slowest". What would change it is what the rollout that is waited for does at that moment; so for the
advice the second counts for the phase of that rollout, unless that rollout takes more than twice as long as the median.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import median

from ratchet.types import JsonObject
from reads.run_times import TRAINED, BoxTimes, GroupTimes, Interval, RolloutTimes, RunTimes, TrainedStepTimes

_OUTLIER = 2.0
"""A rollout that takes so many times the median duration is one of the slowest."""
NO_USE = "groups without use"
"""The cause if most would be saved by groups that each give a step something to train."""


class Phase(StrEnum):
    """A use of a rollout's time, to which each second of its life is assigned."""

    QUEUE = "queue"
    BOOT = "boot"
    ENGINE = "engine"
    NO_ENGINE = "waiting for an engine"
    TOOLS = "tools"
    GRADING = "grading"
    SLOWEST = "waiting for the slowest"
    EVALUATION = "evaluation"
    TRAINING = "training"
    SYNC = "sync"
    OTHER = "other"


SETTINGS: Mapping[str, str] = {
    Phase.QUEUE: "sandbox.max_boxes: rollouts wait for a free box",
    Phase.BOOT: "queues.boot.slots of temporal.yaml, smaller images, or images that the hosts have already",
    Phase.ENGINE: "more engines, or engine.max_num_seqs; sampling.max_response_tokens and harness.max_turns bound it",
    Phase.NO_ENGINE: "more engines: calls wait because none is ready",
    Phase.TOOLS: "harness.step_timeout_seconds bounds a tool call; sandbox.cpus, if the boxes compete for cores",
    Phase.GRADING: "the time of the tasks' tests; grading.control_share, if most verdicts are solved",
    Phase.SLOWEST: "limits.agent_seconds or harness.max_turns bound the slowest; training.max_staleness hides them",
    Phase.EVALUATION: "evaluation.at, evaluation.every and evaluation.samples: training waits for evaluations",
    Phase.TRAINING: "training.workers: groups wait until the learner has trained",
    Phase.SYNC: "training.max_staleness above 0: groups wait until the engines have the new weights",
    Phase.OTHER: "none: the time is spent between the stages; `ratchet status RUN` and the Temporal UI show retries",
    NO_USE: "training.solve_rates or sampling.temperature: many groups are sampled that no step trains",
}
"""The change that would help against each cause."""


@dataclass(slots=True)
class Advice:
    """`num_steps`: the newest ones of `num_trained_steps`. `wall_hours`: since the step before was in the engines.
    `hours`: rollout-hours by phase. `causes`: the same with waiting counted for what is waited for.

    `wasted_hours`: of groups that were consumed without being trained. `cause`: the largest one, and `setting` what
    would change it; without it, at most `share` of the hours would be saved.
    """

    run_id: str
    num_steps: int
    num_trained_steps: int
    num_rollouts: int
    wall_hours: float
    hours: dict[str, float] = field(default_factory=dict)
    causes: dict[str, float] = field(default_factory=dict)
    wasted_hours: float = 0.0
    box_hours: float = 0.0
    num_sampled_tokens: int = 0
    num_trained_tokens: int = 0
    cause: str = ""
    setting: str = ""
    share: float = 0.0

    def as_json(self) -> JsonObject:
        """Return the fields, and the cost per million trained tokens; None if none was trained."""
        million = self.num_trained_tokens / 1e6
        return {
            **asdict(self),
            "sampled_tokens_per_trained_token": self.num_sampled_tokens / (self.num_trained_tokens or 1),
            "box_hours_per_million_trained_tokens": self.box_hours / million if million else None,
            "wall_hours_per_million_trained_tokens": self.wall_hours / million if million else None,
        }


@dataclass(slots=True, frozen=True)
class _Span:
    """A stretch of a rollout's life and the shares of its phases."""

    start: float
    end: float
    shares: Mapping[Phase, float]


def advise_run(times: RunTimes) -> Advice:
    """Add up the phases and name the setting. Without a trained step there is no advice."""
    steps = {one.step: one for one in times.steps}
    advice = Advice(times.run_id, len(steps), times.num_trained_steps, len(times.rollouts), 0.0)
    if not steps or not times.groups:
        return advice
    members: dict[int, list[RolloutTimes]] = defaultdict(list)
    for rollout in times.rollouts:
        members[rollout.group_id].append(rollout)
    account = _Account(times, members)
    for group in times.groups:
        account.add_group(group)
    last = max(one.stepped + one.sync_seconds for one in steps.values())
    began = min(group.created for group in times.groups) if times.began is None else times.began
    advice.wall_hours = (last - began) / 3600
    advice.hours = _hours(account.seconds)
    advice.causes = _hours(account.causes)
    advice.wasted_hours = account.wasted_seconds / 3600
    boxes = [box for rollout in times.rollouts for box in rollout.boxes]
    advice.box_hours = sum((box.released or box.granted) - box.granted for box in boxes) / 3600
    trained = {group.group_id for group in times.groups if group.use == TRAINED}
    advice.num_sampled_tokens = sum(rollout.num_sampled for rollout in times.rollouts)
    useful = [one.num_trained for one in times.rollouts if one.group_id in trained]
    advice.num_trained_tokens = sum(useful)
    _conclude(advice, num_wasted=len(times.rollouts) - len(useful))
    return advice


def _conclude(advice: Advice, num_wasted: int) -> None:
    """Name what costs most. Of `num_wasted` rollouts nothing is trained; with as many fewer, a step would need so much
    less of the hours that are spent before its plan."""
    total = sum(advice.causes.values())
    if not total:
        return
    after = sum(advice.causes.get(phase, 0.0) for phase in (Phase.TRAINING, Phase.SYNC, Phase.EVALUATION))
    shares = {name: hours / total for name, hours in advice.causes.items()}
    shares[NO_USE] = num_wasted / advice.num_rollouts * (1 - after / total)
    advice.cause = max(shares, key=lambda name: shares[name])
    advice.setting = SETTINGS[advice.cause]
    advice.share = shares[advice.cause]


def _hours(seconds: Mapping[Phase, float]) -> dict[str, float]:
    return {phase.value: seconds[phase] / 3600 for phase in Phase if seconds.get(phase)}


class _Account:
    """The seconds of each phase, as they are shown (`seconds`) and by what would change them (`causes`)."""

    def __init__(self, times: RunTimes, members: Mapping[int, Sequence[RolloutTimes]]) -> None:
        self.seconds: dict[Phase, float] = defaultdict(float)
        self.causes: dict[Phase, float] = defaultdict(float)
        self.wasted_seconds = 0.0
        self._members = members
        self._steps = {one.step: one for one in times.steps}
        self._training = [Interval(one.planned, one.stepped) for one in times.steps]
        self._sync = [Interval(one.stepped, one.stepped + one.sync_seconds) for one in times.steps]
        self._evaluations = sorted(times.evaluations, key=lambda one: one.start)
        self._spans = {rollout.rollout_id: spans_of(rollout) for rollout in times.rollouts}
        self._limit = _OUTLIER * median([one.ended - one.created for one in times.rollouts] or [0.0])
        of_step: dict[int | None, list[RolloutTimes]] = defaultdict(list)
        for group in times.groups:
            of_step[group.step] += members.get(group.group_id, ())
        self._last_of_step = {step: max(found, key=lambda one: one.ended) for step, found in of_step.items() if found}

    def add_group(self, group: GroupTimes) -> None:
        """Follow each member from its start until the weights are in the engines."""
        before = sum(self.seconds.values())
        members = self._members.get(group.group_id, ())
        last = max(members, key=lambda one: one.ended, default=None)
        for member in members:
            for span in self._spans[member.rollout_id]:
                for phase, share in span.shares.items():
                    self._add(phase, share * (span.end - span.start))
            assert last is not None
            self._wait(member.ended, max(member.ended, group.ready), last)
        if group.use == TRAINED and group.step is not None and last is not None:
            self._add_learner(group, self._steps[group.step], len(members), self._last_of_step[group.step])
        else:
            self.wasted_seconds += sum(self.seconds.values()) - before

    def _add_learner(self, group: GroupTimes, step: TrainedStepTimes, size: int, last: RolloutTimes) -> None:
        """Add the time from the group's last verdict to the update of the engines. `last`: the step's last rollout."""
        at = group.ready
        for phase, intervals in (
            (Phase.EVALUATION, self._evaluations),
            (Phase.TRAINING, self._training),
            (Phase.SYNC, self._sync),
        ):
            common = sum(max(0.0, min(step.planned, one.end) - max(at, one.start)) for one in intervals)
            self._add(phase, size * common)
        busy = [*self._evaluations, *self._training, *self._sync]
        for gap in _gaps(busy, at, step.planned):
            for _ in range(size):
                self._wait(gap.start, gap.end, last)
        for span in step_spans(step, self._evaluations):
            for phase in span.shares:
                self._add(phase, size * (span.end - span.start))
        self._add(Phase.SYNC, size * step.sync_seconds)

    def _add(self, phase: Phase, seconds: float) -> None:
        self.seconds[phase] += seconds
        self.causes[phase] += seconds

    def _wait(self, start: float, end: float, blocking: RolloutTimes) -> None:
        self.seconds[Phase.SLOWEST] += end - start
        if blocking.ended - blocking.created > self._limit:
            self.causes[Phase.SLOWEST] += end - start
            return
        left = end - start
        for span in self._spans[blocking.rollout_id]:
            common = max(0.0, min(end, span.end) - max(start, span.start))
            left -= common
            for phase, share in span.shares.items():
                self.causes[phase] += share * common
        self.causes[Phase.OTHER] += max(0.0, left)


def step_spans(step: TrainedStepTimes, evaluations: Iterable[Interval]) -> list[_Span]:
    """Return the time from a step's plan to its weights: it is trained, and waits before that for a learner that
    starts, or behind it for the end of an evaluation, which samples the weights before them."""
    whole = step.stepped - step.planned
    worked = whole if step.worked_seconds is None else min(whole, step.worked_seconds)
    if any(step.planned < one.end <= step.stepped for one in evaluations):
        phases, middle = (Phase.TRAINING, Phase.EVALUATION), step.planned + worked
    else:
        phases, middle = (Phase.OTHER, Phase.TRAINING), step.stepped - worked
    ends = (step.planned, middle, step.stepped)
    return [_Span(*at, {phase: 1.0}) for phase, at in zip(phases, pairwise(ends), strict=True) if at[1] > at[0]]


def spans_of(rollout: RolloutTimes) -> list[_Span]:
    """Return the rollout's life in order, without gaps: what is no stage is `other`, before a box it is `queue`."""
    spans: list[_Span] = []
    at = rollout.created
    for box in rollout.boxes:
        live = box.live if box.live is not None else box.released or box.granted
        for end, shares in (
            (box.granted, {Phase.QUEUE: 1.0}),
            (live, {Phase.BOOT: 1.0}),
            (box.released if box.released is not None else rollout.ended, _work(rollout, box)),
        ):
            end = min(end, rollout.ended)
            if end > at:
                spans.append(_Span(at, end, shares))
                at = end
    if rollout.ended > at:
        spans.append(_Span(at, rollout.ended, {Phase.OTHER: 1.0}))
    return spans


def _work(rollout: RolloutTimes, box: BoxTimes) -> Mapping[Phase, float]:
    """Return what a live box is used for. Calls of several lanes may overlap, so they are at most the agent's time."""
    if box.is_grading:
        return {Phase.GRADING: 1.0}
    held = sum(
        (one.released or one.live) - one.live for one in rollout.boxes if not one.is_grading and one.live is not None
    )
    if held <= 0:
        return {Phase.OTHER: 1.0}
    agent = min(held, held if rollout.agent_seconds is None else rollout.agent_seconds)
    calls = min(agent, rollout.call_seconds)
    waits = min(calls, rollout.wait_seconds)
    return {
        Phase.ENGINE: (calls - waits) / held,
        Phase.NO_ENGINE: waits / held,
        Phase.TOOLS: (agent - calls) / held,
        Phase.OTHER: (held - agent) / held,
    }


def _gaps(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of [start, end] that no interval covers."""
    found = []
    at = start
    for one in sorted(intervals, key=lambda interval: interval.start):
        if one.start > at and at < end:
            found.append(Interval(at, min(one.start, end)))
        at = max(at, one.end)
    if at < end:
        found.append(Interval(at, end))
    return found
