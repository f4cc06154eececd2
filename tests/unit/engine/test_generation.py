"""The experts of an output that several engines have sampled one after the other."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.generation import SampledTokens


def reply(ids: list[int], experts: npt.NDArray[np.uint8] | None, finish: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"token_ids": ids, "finish_reason": finish, "routed_experts": None}
    if experts is not None:
        buffer = BytesIO()
        np.save(buffer, experts)
        choice["routed_experts"] = b64encode(buffer.getvalue()).decode()
    return {"choices": [choice]}


def rows(count: int, value: int) -> npt.NDArray[np.uint8]:
    return np.full((count, 3, 2), value, np.uint8)


def test_tokens_that_an_ended_call_computed_keep_its_experts() -> None:
    """The prompt has four tokens. The second engine computes all of them again, and may choose other experts."""
    sampled = SampledTokens()
    sampled.add(reply([7, 8], rows(5, 1), "abort"))
    sampled.continue_elsewhere()
    sampled.add(reply([9], rows(6, 2), "stop"))
    experts = sampled.generation().routed_experts
    assert experts is not None and experts[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 2]


def test_an_output_that_is_sampled_anew_has_the_experts_of_the_last_call_alone() -> None:
    sampled = SampledTokens()
    sampled.add(reply([7, 8], rows(5, 1), "abort"))
    sampled.begin_again()
    sampled.add(reply([9], None, "stop"))
    assert sampled.generation().routed_experts is None
