"""Arguments and results of TrainRun's updates and of their activities; the rules of `payloads.py` apply."""

from typing import Any

from pydantic import Field

from ratchet.bounded_numbers import Positive
from ratchet.payloads import Payload, StageResult, StartInput
from ratchet.types import SteeringAction


class SteerInput(StartInput):
    """Base of the arguments of TrainRun's updates. `by`: who asks; the audit table holds it with the `reason`."""

    by: str = ""
    reason: str = ""


class ExtendInput(SteerInput):
    """Argument of the update `extend`: how many steps to add."""

    steps: Positive


class ChangeInput(SteerInput):
    """Argument of the update `set`: config keys and their new values, such as {"training.max_staleness": 2}."""

    changes: dict[str, Any] = Field(min_length=1)


class TargetInput(SteerInput):
    """Argument of the updates `cancel` and `retry`: the workflow of a group or rollout, or a rollout's number."""

    what: str


class SteerRunInput(Payload):
    """A person's request to a run by an update. `request_id`: the update's id, so that a retry changes nothing."""

    run_id: str
    action: SteeringAction
    request_id: str
    by: str
    reason: str = ""
    steps: int = 0
    changes: dict[str, Any] = Field(default_factory=dict)


class SteerTargetInput(Payload):
    """A person's request about one group or rollout; `what` is its workflow id, or the number of a rollout.

    `run_id`: the run whose workflow was asked, to which it must belong.
    """

    action: SteeringAction
    what: str
    request_id: str
    run_id: str
    by: str
    reason: str = ""


class SteerRunResult(StageResult):
    """The effect of a request, as one sentence; `changed` is False if there was none."""

    text: str
    changed: bool
