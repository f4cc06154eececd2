"""The newest steps of a run over time: lanes of the learner, evaluations, engines and rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ratchet.durations import duration_in_words
from reads.advice import Phase, spans_of
from reads.run_times import CallUse, Interval, RolloutTimes, RunTimes

NUM_PARTS = 60
MAX_ROLLOUTS = 200


@dataclass(slots=True, frozen=True)
class LaneBar:
    """`phase`: a `Phase`, or what the learner waits for. `start`, `width`, `height`: shares of the window and lane."""

    phase: str
    start: float
    width: float
    height: float
    label: str


@dataclass(slots=True, frozen=True)
class RunLane:
    name: str  # learner, evaluations, engines, or a rollout's number
    bars: list[LaneBar]


def use_window(times: RunTimes) -> Interval | None:
    """Return the time from the first group to the last step; None without a trained step."""
    if not times.groups or not times.steps:
        return None
    window = Interval(min(one.created for one in times.groups), max(one.stepped for one in times.steps))
    return window if window.end > window.start else None


def run_lanes(times: RunTimes, window: Interval, calls: Sequence[CallUse]) -> list[RunLane]:
    """Return the lanes of learner, evaluations and engines, and of every n-th rollout, `MAX_ROLLOUTS` at most."""

    def bar(phase: str, start: float, end: float, label: str = "", height: float = 1.0) -> LaneBar:
        low, high = (
            (min(max(at, window.start), window.end) - window.start) / (window.end - window.start) for at in (start, end)
        )
        return LaneBar(phase, low, high - low, height, f"{label or phase}, {duration_in_words(end - start)}")

    def rollout_bars(one: RolloutTimes) -> list[LaneBar]:
        bars = []
        for span in spans_of(one):
            shares = sorted(span.shares.items(), key=lambda item: -item[1])
            label = ", ".join(f"{phase} {share:.0%}" for phase, share in shares if share)
            bars.append(bar(shares[0][0], span.start, span.end, label))
        return [*bars, bar(Phase.SLOWEST, one.ended, max(one.ended, ready[one.group_id]))]

    ready = {one.group_id: one.ready for one in times.groups}
    idle_since, learner = window.start, []
    for step in times.steps:
        learner += [
            bar("waiting for a batch", idle_since, max(idle_since, step.planned)),
            bar(Phase.TRAINING, step.planned, step.stepped, f"step {step.step} is trained"),
            bar(Phase.SYNC, step.stepped, step.stepped + step.sync_seconds, f"weights of step {step.step}"),
        ]
        idle_since = step.stepped + step.sync_seconds
    width, most = (window.end - window.start) / NUM_PARTS, max((one.call_seconds for one in calls), default=0.0)
    engines = []
    for one in calls:
        start, busy = window.start + one.part * width, f"{one.call_seconds / width:.1f} calls at once"
        label = f"{busy}, {one.num_sampled / width:.0f} tokens sampled a second"
        engines.append(bar(Phase.ENGINE, start, start + width, label, one.call_seconds / (most or 1.0)))
    rollouts = sorted(times.rollouts, key=lambda one: one.created)[:: ceil(len(times.rollouts) / MAX_ROLLOUTS) or 1]
    return [
        RunLane("learner", learner),
        RunLane("evaluations", [bar(Phase.EVALUATION, one.start, one.end) for one in times.evaluations]),
        RunLane("engines", engines),
        *(RunLane(str(one.rollout_id), rollout_bars(one)) for one in rollouts),
    ]
