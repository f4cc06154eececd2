"""An output that several engines have sampled one after the other: its experts, and its versions."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.generation import SampledTokens
from ratchet.lora_slots import version_in_label


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


def spans(*found: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in found]


def test_a_label_is_read_as_the_version_of_the_calls_slot() -> None:
    """Both slots get a version in the first call; the engine of the second one begins without the run."""
    sampled = SampledTokens(version_of=lambda label: version_in_label(label, 2))
    first = reply([7, 8, 9, 10], None, "abort")
    first["choices"][0]["weight_versions"] = spans(
        ("a/1.e1;b/3.e1", 0, 1), ("a/2.e1;b/3.e1", 1, 3), ("a/2.e1;b/4.e1", 3, 4)
    )
    sampled.add(first)
    sampled.continue_elsewhere()
    second = reply([11, 12], None, "stop")
    second["choices"][0]["weight_versions"] = spans(("a/2.e1", 0, 1), ("a/2.e1;b/4.e1", 1, 2))
    sampled.add(second)
    generation = sampled.generation()
    assert generation.version_spans == spans(("b/3.e1", 0, 3), ("b/4.e1", 3, 4), ("default", 4, 5), ("b/4.e1", 5, 6))
