"""Marks lie where the curves have the step, or the moment, that they are about."""

from dataclasses import replace
from datetime import timedelta

import pytest

from ratchet.types import SteeringAction
from reads.steering import SteeringLine
from reads.versions import LearnerRestart
from tests.unit.viewer.models.test_charts import START, curves, evaluation
from viewer.models.marks import chart_marks


def request(action: SteeringAction, from_step: int, hours: float) -> SteeringLine:
    moment = START + timedelta(hours=hours)
    return SteeringLine(7, action, "", None, None, moment, "anna@desk", f"{action} it", "", "too fast", from_step)


REQUESTS = [request(SteeringAction.SET, 2, 1.5), request(SteeringAction.PAUSE, 3, 9.0)]
REQUESTS += [request(SteeringAction.CANCEL, 1, 0.1)]
RESTARTS = [LearnerRestart(3, 2, START + timedelta(hours=1.75))]
RUN = replace(curves(), evaluations=[evaluation("start", 0, 0.5), evaluation("middle", 1, None, created=1)])


@pytest.mark.parametrize(
    ("axis", "xs"),
    [
        ("steps", {"set": 2, "pause": 2, "restart": 2, "start": 1, "middle": 1}),
        ("tokens", {"set": 150, "pause": 150, "restart": 150, "start": 100, "middle": 100}),
        ("hours", {"set": 1.5, "pause": 2, "restart": 1.75, "start": 1, "middle": 1}),
    ],
)
def test_places(axis: str, xs: dict[str, float]) -> None:
    words = {"set": "asked: set it", "pause": "asked: pause it", "restart": "a new learner (epoch 3) trained step 2"}
    words |= {"start": "evaluation start of step 0", "middle": "evaluation middle of step 1"}
    marks = chart_marks(RUN, REQUESTS, RESTARTS, axis)
    found = {name: one.x for one in marks for name, text in words.items() if text in one.text}
    assert found == xs and len(marks) == len(xs), "a cancelled group is no mark"
    assert [one.x for one in marks] == sorted(xs.values())


def test_a_mark_says_when_and_leads_to_its_page() -> None:
    mark = next(one for one in chart_marks(RUN, REQUESTS, RESTARTS, "steps") if "asked: set" in one.text)
    assert mark.text == "2026-01-01 01:30 UTC: anna@desk asked: set it, from step 2 on (too fast)"
    assert mark.link == "/runs/r/steering#request-7"


def test_what_was_before_the_charted_steps_has_no_mark() -> None:
    late = replace(RUN, metrics={step + 100: values for step, values in RUN.metrics.items() if step}, rewards=[])
    assert chart_marks(late, REQUESTS, RESTARTS, "steps") == []
    assert chart_marks(replace(RUN, metrics={}, rewards=[]), REQUESTS, RESTARTS, "steps") == []
