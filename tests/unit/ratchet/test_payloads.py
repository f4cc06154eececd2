"""Workers of two versions exchange payloads: a field that one of them does not know must not fail a workflow."""

import inspect

import pytest
from pydantic import ValidationError

from ratchet import grading_payloads, payloads, sweep_payloads
from ratchet.payloads import Payload, Planned, RolloutInput, StartInput, TrainRunInput

PAYLOADS = sorted(
    {
        found
        for module in (payloads, grading_payloads, sweep_payloads)
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, Payload)
    },
    key=lambda found: found.__name__,
)


@pytest.mark.parametrize("kind", PAYLOADS, ids=lambda kind: kind.__name__)
def test_only_what_people_start_refuses_unknown_fields(kind: type[Payload]) -> None:
    assert (kind.model_config["extra"] == "forbid") == issubclass(kind, StartInput)


def test_a_result_of_a_newer_worker_is_read() -> None:
    assert Planned.model_validate_json('{"step": 3, "reason": "new in a later version"}') == Planned(step=3)


def test_a_childs_argument_of_a_newer_workflow_is_read() -> None:
    assert RolloutInput.model_validate_json('{"rollout_id": 7, "priority": null}') == RolloutInput(rollout_id=7)


def test_a_typing_mistake_is_refused() -> None:
    with pytest.raises(ValidationError, match="confg_path"):
        TrainRunInput.model_validate_json('{"confg_path": "a.yaml", "run_id": "r"}')
