"""The newest steps of a run over time: lanes of the learner, evaluations, engines, boxes and rollouts."""

from collections.abc import Sequence
from math import ceil

import numpy as np

from reads.advice import Phase, spans_of, step_spans
from reads.run_times import CallUse, Interval, RolloutTimes, RunTimes
from viewer.models.timeline import TimeBar, TimeLane

NUM_PARTS = 60
MAX_ROLLOUTS = 200
_OF_STEP = {
    Phase.TRAINING: "is trained",
    Phase.EVALUATION: "waits for the end of an evaluation",
    Phase.OTHER: "waits for the learner to start",
}


def use_window(times: RunTimes) -> Interval | None:
    """Return the time from the first group to the last step; None without a trained step."""
    if not times.groups or not times.steps:
        return None
    window = Interval(min(one.created for one in times.groups), max(one.stepped for one in times.steps))
    return window if window.end > window.start else None


def run_lanes(times: RunTimes, window: Interval, calls: Sequence[CallUse]) -> list[TimeLane]:
    """Return the lanes of learner, evaluations, engines and boxes, and of every n-th rollout, `MAX_ROLLOUTS` at most.

    The kind of a bar is a `Phase`, or what the learner waits for; a rollout's lane has its number as name. A bar of
    engines or boxes is as high as the number of calls or of boxes at once."""

    def bar(phase: str, start: float, end: float, label: str = "", height: float = 1.0) -> TimeBar:
        low, high = (
            (min(max(at, window.start), window.end) - window.start) / (window.end - window.start) for at in (start, end)
        )
        return TimeBar(phase, low, high - low, end - start, label or phase, height=height)

    def rollout_bars(one: RolloutTimes) -> list[TimeBar]:
        bars = []
        for span in spans_of(one):
            shares = sorted(span.shares.items(), key=lambda item: -item[1])
            label = ", ".join(f"{phase} {share:.0%}" for phase, share in shares if share)
            bars.append(bar(shares[0][0], span.start, span.end, label))
        return [*bars, bar(Phase.SLOWEST, one.ended, max(one.ended, ready[one.group_id]))]

    ready = {one.group_id: one.ready for one in times.groups}
    idle_since, learner = window.start, []
    for step in times.steps:
        learner.append(bar("waiting for a batch", idle_since, max(idle_since, step.planned)))
        for span in step_spans(step, times.evaluations):
            (phase,) = span.shares
            learner.append(bar(phase, span.start, span.end, f"step {step.step} {_OF_STEP[phase]}"))
        learner.append(bar(Phase.SYNC, step.stepped, step.stepped + step.sync_seconds, f"weights of step {step.step}"))
        idle_since = step.stepped + step.sync_seconds
    width, most = (window.end - window.start) / NUM_PARTS, max((one.call_seconds for one in calls), default=0.0)
    engines = []
    for one in calls:
        start, busy = window.start + one.part * width, f"{one.call_seconds / width:.1f} calls at once"
        label = f"{busy}, {one.num_sampled / width:.0f} tokens sampled a second"
        engines.append(bar(Phase.ENGINE, start, start + width, label, one.call_seconds / (most or 1.0)))
    held = [(one.granted, one.released or window.end) for rollout in times.rollouts for one in rollout.boxes]
    begun, ended = np.array(held).reshape(-1, 2, 1).swapaxes(0, 1)
    starts = window.start + width * np.arange(NUM_PARTS)
    overlaps = np.minimum(ended, starts + width) - np.maximum(begun, starts)
    at_once = [float(one) for one in overlaps.clip(min=0.0).sum(axis=0) / width]
    boxes = [
        bar(Phase.TOOLS, start, start + width, f"{number:.1f} boxes at once", number / (max(at_once) or 1.0))
        for start, number in zip(starts.tolist(), at_once, strict=True)
    ]
    rollouts = sorted(times.rollouts, key=lambda one: one.created)[:: ceil(len(times.rollouts) / MAX_ROLLOUTS) or 1]
    return [
        TimeLane("learner", learner),
        TimeLane("evaluations", [bar(Phase.EVALUATION, one.start, one.end) for one in times.evaluations]),
        TimeLane("engines", engines),
        TimeLane("boxes", boxes),
        *(TimeLane(str(one.rollout_id), rollout_bars(one)) for one in rollouts),
    ]
