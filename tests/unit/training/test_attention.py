"""Segment attention against attention under an explicit mask: values and gradients, in double precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.training.forests import forest
from training import attention, attention_kernels
from training.attention_blocks import TreeLayout, group_blocks
from training.attention_kernels import BlockOutput
from training.prefix_tree import Segment

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def laid_out(segments: list[Segment]) -> TreeLayout:
    return TreeLayout(segments, group_blocks(segments, torch.device("cpu")))


def masked(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment]) -> Tensor:
    size = segments[-1].end
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        allowed[segment.start : segment.subtree_end, segment.start : segment.end] = True
    allowed &= torch.ones(size, size, dtype=torch.bool).tril()
    repeated = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=allowed, scale=0.3)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=9), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_any_forest(shape: list[tuple[int, int]], seed: int) -> None:
    segments = forest(shape)
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(1, heads, segments[-1].end, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    ours, _ = attention.segment_attention(torch.nn.Module(), *parts, None, tree=laid_out(segments), scaling=0.3)
    theirs = masked(*parts, segments).transpose(1, 2)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad(ours, parts, grad), torch.autograd.grad(theirs, parts, grad), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_form_equals_the_kernels(causal: bool) -> None:
    """The fallback without a flash kernel has the same output, log-sum-exp and gradients."""
    query = torch.randn(20, HEADS, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, 20, KEY_HEADS, SIZE, dtype=torch.float64)
    group = replace(group_blocks(forest([(20, 0)]), query.device)[0], causal=causal)
    block = attention_kernels.forward(query, key, value, group, 0.3)
    batched = [part.transpose(0, 1)[None] for part in (query, key, value)]
    plain_out, plain_lse = attention_kernels.plain_forward(*batched, causal, 0.3)
    torch.testing.assert_close(block.out, plain_out[0].transpose(0, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(block.lse, plain_lse[0], rtol=0, atol=1e-12)
    grad = torch.randn_like(query)
    found = attention_kernels.backward(grad, query, key, value, block, group, 0.3)
    plain = attention_kernels.plain_backward(grad.transpose(0, 1)[None], *batched, plain_out, plain_lse, causal, 0.3)
    for mine, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, expected[0].transpose(0, 1), rtol=0, atol=1e-12)


def _read_as_the_flash_kernel_does(lse: Tensor) -> Tensor:
    """CUDA's flash backward takes the log-sum-exp by its address only and expects it contiguous (H, T)."""
    heads, size = lse.shape
    room = lse.untyped_storage().nbytes() // lse.element_size() - lse.storage_offset()
    flat = lse.as_strided((min(room, heads * size),), (1,), lse.storage_offset())
    return torch.nn.functional.pad(flat, (0, heads * size - len(flat)), value=torch.nan).view(heads, size)


@pytest.mark.parametrize(
    "shape", [[(7, 0)], [(5, 0), (7, 0)], [(5, 0), (3, 1), (4, 1), (2, 0), (1, 1)]], ids=["chain", "packed", "tree"]
)
def test_a_kernel_that_addresses_the_log_sum_exp_reads_the_right_values(
    shape: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No card is needed to see what a kernel would read: its addressing is repeated on the CPU."""
    segments = forest(shape)
    parts = [
        torch.randn(1, heads, segments[-1].end, SIZE, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    expected = masked(*parts, segments).transpose(1, 2)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    right = attention_kernels.backward

    def addressed(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads, query, key, value, whole, *more = given
        read = BlockOutput(whole.out, _read_as_the_flash_kernel_does(whole.lse), whole.extra)
        return right(grads, query, key, value, read, *more)

    monkeypatch.setattr(attention_kernels, "backward", addressed)
    ours, _ = attention.segment_attention(torch.nn.Module(), *parts, None, tree=laid_out(segments), scaling=0.3)
    for mine, theirs in zip(
        torch.autograd.grad(ours, parts, grad), torch.autograd.grad(expected, parts, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
