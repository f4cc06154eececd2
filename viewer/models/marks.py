"""Marks on a run's curves: what people asked of it, restarts of its learner, and its evaluations."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
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
    steps = sorted(step for step in curves.metrics if step > 0 and step in positions)
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


def _events(
    curves: RunCurves, requests: Sequence[SteeringLine], restarts: Sequence[LearnerRestart]
) -> Iterator[_RunEvent]:
    run = quote(curves.run_id)
    for asked in requests:
        if asked.action not in _OF_PARTS:
            since = f", from step {asked.from_step} on" if asked.action == SteeringAction.SET else ""
            text = f"{asked.asked_by} asked: {asked.what}{since}{f' ({asked.reason})' if asked.reason else ''}"
            link = f"/runs/{run}/steering#request-{asked.id}"
            yield _RunEvent(MarkKind.REQUEST, asked.from_step, asked.asked_at, text, link)
    for one in restarts:
        text = f"a new learner (epoch {one.epoch}) trained step {one.step} and went on from there"
        yield _RunEvent(MarkKind.RESTART, one.step, one.published_at, text, f"/runs/{run}/versions")
    for rate in curves.evaluations:
        text, link = (
            f"evaluation {rate.label} of step {rate.step}",
            f"/rollouts?run={run}&evaluation={quote(rate.label)}",
        )
        yield _RunEvent(MarkKind.EVALUATION, rate.step, rate.created_at, text, link)
