"""A returned sample counts only if it is one of the recorded ones."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from activities.generate import differing_field


def recorded(tokens: list[int], mask: list[int], logprobs: list[float]) -> SimpleNamespace:
    arrays = {"tokens": np.array(tokens, np.int32), "loss_mask": np.array(mask, np.int8)}
    return SimpleNamespace(**arrays, rollout_log_probs=np.array(logprobs, np.float32))


RECORDED = [recorded([1, 2, 3], [0, 1], [0.0, -0.1]), recorded([1, 2, 3], [1, 1], [-0.3, -0.1])]
SECOND = {"tokens": [1, 2, 3], "loss_mask": [1, 1], "rollout_log_probs": RECORDED[1].rollout_log_probs.tolist()}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, ""),
        ({"reward": 0.5, "response": "other text"}, ""),
        ({"tokens": (1, 2, 3)}, ""),
        ({"tokens": [1, 2, 4]}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"loss_mask": [1, 0]}, "loss_mask"),
        ({"loss_mask": [[1, 1]]}, "loss_mask"),
        ({"rollout_log_probs": [-0.3, -0.2]}, "rollout_log_probs"),
        ({"rollout_log_probs": [-0.3, float("nan")]}, "rollout_log_probs"),
        ({"loss_mask": [0, 1]}, "rollout_log_probs"),  # the mask of the one and the logprobs of the other
    ],
)
def test_a_sample_is_one_of_the_recorded_ones(changes: dict[str, Any], field: str) -> None:
    assert differing_field(SimpleNamespace(**{**SECOND, **changes}), RECORDED) == field


def test_an_object_that_is_no_sample_is_none_of_them() -> None:
    assert differing_field("text", RECORDED) == differing_field(SimpleNamespace(), []) == "tokens"
