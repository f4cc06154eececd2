"""Segment attention against attention under an explicit mask: values and gradients, in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training import attention
from training.prefix_tree import Segment

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def forest(shape: list[tuple[int, int]]) -> list[Segment]:
    """Make a forest from (length, depth) of its segments, depth-first. A depth that is too great becomes a child's."""
    path: list[int] = []
    drawn: list[tuple[int, int, int, int]] = []
    start = 0
    for number, (length, depth) in enumerate(shape):
        path = path[:depth]
        parent = path[-1] if path else -1
        drawn.append(
            (start, start + length, drawn[parent][2] + drawn[parent][1] - drawn[parent][0] if path else 0, parent)
        )
        path.append(number)
        start += length
    ends = [end for _, end, _, _ in drawn]
    for number in range(len(drawn) - 1, -1, -1):
        if drawn[number][3] >= 0:
            ends[drawn[number][3]] = max(ends[drawn[number][3]], ends[number])
    return [Segment(first, end, ends[n], position, parent) for n, (first, end, position, parent) in enumerate(drawn)]


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
    ours, _ = attention.segment_attention(torch.nn.Module(), *parts, None, segments=segments, scaling=0.3)
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
    query = torch.randn(1, HEADS, 20, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, 1, KEY_HEADS, 20, SIZE, dtype=torch.float64)
    out, lse, extra = attention._block_forward(query, key, value, causal, 0.3)
    plain_out, plain_lse = attention._plain_forward(query, key, value, causal, 0.3)
    torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-12)
    grad = torch.randn_like(query)
    given = (grad, query, key, value, out, lse, causal, 0.3)
    for mine, expected in zip(attention._plain_backward(*given), attention._block_backward(*given, extra), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def _read_as_the_flash_kernel_does(lse: Tensor) -> Tensor:
    """CUDA's flash backward takes the log-sum-exp by its address only and expects it contiguous (1, H, T)."""
    _, heads, size = lse.shape
    room = lse.untyped_storage().nbytes() // lse.element_size() - lse.storage_offset()
    flat = lse.as_strided((min(room, heads * size),), (1,), lse.storage_offset())
    return torch.nn.functional.pad(flat, (0, heads * size - len(flat)), value=torch.nan).view(1, heads, size)


@pytest.mark.parametrize("shape", [[(5, 0), (7, 0)], [(5, 0), (3, 1), (4, 1)]], ids=["packed", "tree"])
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
    plain = attention._plain_backward

    def addressed(*given: object) -> tuple[Tensor, Tensor, Tensor]:
        grads, query, key, value, out, lse, causal, scale, _ = given
        read = _read_as_the_flash_kernel_does(lse)  # type: ignore[arg-type]
        return plain(grads, query, key, value, out, read, causal, scale)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_block_backward", addressed)
    ours, _ = attention.segment_attention(torch.nn.Module(), *parts, None, segments=segments, scaling=0.3)
    for mine, theirs in zip(
        torch.autograd.grad(ours, parts, grad), torch.autograd.grad(expected, parts, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
