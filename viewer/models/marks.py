"""Marks on a run's curves: what people asked of it, restarts of its learner, and its evaluations."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from urllib.parse import quote

from ratchet.types import SteeringAction
from reads.steering import SteeringLine
from reads.versions import LearnerRestart
from viewer.models.charts import RunCurves, step_positions

_OF_PARTS = (SteeringAction.CANCEL, SteeringAction.RETRY, SteeringAction.EVALUATE)
"""Requests about a group, a rollout or an evaluation, which change no setting of the run."""


class MarkKind(StrEnum):
    REQUEST = "request"
    RESTART = "restart"
    EVALUATION = "evaluation"


@dataclass(slots=True, frozen=True)
class ChartMark:
    """A vertical line at `x` of the charts' axis, with its words and the page that says more."""

    x: float
    kind: MarkKind
    text: str
    link: str


@dataclass(slots=True, frozen=True)
class _RunEvent:
    """`step`: the first one that was planned or trained after it, or the one that was evaluated."""

    kind: MarkKind
    step: int
    at: datetime
    text: str
    link: str


def chart_marks(
    curves: RunCurves, requests: Sequence[SteeringLine], restarts: Sequence[LearnerRestart], axis: str
) -> list[ChartMark]:
    """Return the marks in the order of their places. What was before the first charted step is left out; what has no
    place on the curves yet is at their end."""
    positions = step_positions(curves, axis)
    steps = sorted(step for step in positions if step > 0)  # step 0 is on no curve of metrics
    if not steps:
        return []
    found = []
    for event in _events(curves, requests, restarts):
        if event.step < steps[0] and steps[0] > 1:
            continue
        x = positions[steps[min(bisect_left(steps, event.step), len(steps) - 1)]]
        if axis == "hours":
            hours = (event.at - curves.created_at).total_seconds() / 3600
            x = min(max(hours, positions[steps[0]]), positions[steps[-1]])
        words = f"{event.at.astimezone(UTC):%Y-%m-%d %H:%M} UTC: {event.text}"
        found.append(ChartMark(round(x, 4), event.kind, words, event.link))
    return sorted(found, key=lambda one: one.x)


def _from(request: SteeringLine) -> str:
    """Say from which step on a new value counts."""
    return f", from step {request.from_step} on" if request.action == SteeringAction.SET else ""


def _events(curves: RunCurves, requests: Sequence[SteeringLine], restarts: Sequence[LearnerRestart]) -> list[_RunEvent]:
    run = f"/runs/{quote(curves.run_id)}"
    events = [
        _RunEvent(
            MarkKind.REQUEST,
            one.from_step,
            one.asked_at,
            f"{one.asked_by} asked: {one.what}{_from(one)}{f' ({one.reason})' if one.reason else ''}",
            f"{run}/steering#request-{one.id}",
        )
        for one in requests
        if one.action not in _OF_PARTS
    ]
    events += [
        _RunEvent(
            MarkKind.RESTART,
            one.step,
            one.published_at,
            f"a new learner (epoch {one.epoch}) trained step {one.step} and went on from there",
            f"{run}/versions",
        )
        for one in restarts
    ]
    return events + [
        _RunEvent(
            MarkKind.EVALUATION,
            one.step,
            one.created_at,
            f"evaluation {one.label} of step {one.step}",
            f"/rollouts?run={quote(curves.run_id)}&evaluation={quote(one.label)}",
        )
        for one in curves.evaluations
    ]
