"""Workers of two versions exchange payloads: a field that one of them does not know must not fail a workflow."""

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet import grading_payloads, payloads, sweep_payloads
from ratchet.grading_payloads import AdmitInput, RegradeInput
from ratchet.payloads import Payload, Planned, RolloutInput, StartInput, TrainRunInput
from ratchet.steering_payloads import ExtendInput

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


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (ExtendInput, {"steps": 2**31}),
        (RolloutInput, {"rollout_id": 2**63}),
        (RegradeInput, {"rollout_id": 2**63}),
        (RegradeInput, {"run_id": "r", "repeats": 2**31}),
        (AdmitInput, {"dataset": "d", "limit": 2**31}),
        (AdmitInput, {"dataset": "d", "eval_seconds": float("inf")}),
    ],
)
def test_a_number_that_people_give_fits_into_its_column(model: type[Payload], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Input should be less than"):
        model.model_validate(values)
