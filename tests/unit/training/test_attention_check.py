"""The comparison of attention kernels with the plain formula finds the faults of the large blocks' kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from training import attention_kernels
from training.attention_check import Heads, why_no_own_calls
from training.attention_kernels import BlockOutput

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    assert why_no_own_calls(HEADS, dtype, CPU) is None
    assert why_no_own_calls(HEADS, dtype, CPU, side_by_side=True) is None


def scaled(number: int, factor: float) -> Callable[..., tuple[Tensor, ...]]:
    right = attention_kernels.backward

    def wrong(*given: Any) -> tuple[Tensor, ...]:
        found = right(*given)
        if not given[5].has_own_call:
            return found
        return tuple(part * factor if at == number else part for at, part in enumerate(found))

    return wrong


@DTYPES
@pytest.mark.parametrize("number", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("factor", [0.0, 0.9, 2.0])
def test_a_wrong_gradient_is_found(
    number: int, factor: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "backward", scaled(number, factor))
    reason = why_no_own_calls(HEADS, dtype, CPU)
    assert reason is not None and "has a relative error of" in reason


@DTYPES
@pytest.mark.parametrize("fault", ["the last rows", "the log-sum-exp", "an error"])
def test_a_wrong_output_is_found(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_kernels.forward

    def wrong(*given: Any) -> BlockOutput:
        found = right(*given)
        if not given[3].has_own_call:
            return found
        if fault == "an error":
            raise RuntimeError("no execution plan")
        if fault == "the log-sum-exp":
            return found._replace(lse=found.lse + 0.1)
        out = found.out.clone()
        out[-3:] = 0  # the tail of a tile
        return found._replace(out=out)

    monkeypatch.setattr(attention_kernels, "forward", wrong)
    assert why_no_own_calls(HEADS, dtype, CPU) is not None
