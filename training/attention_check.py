"""Compare the attention kernels of a device with the plain formula, on random inputs in the sizes of a model.

A device may have two kernels: for blocks that share a call, and for large blocks (`training/attention_kernels.py`). The
check of a whole model (`training/policy_check.py`) uses short chains, so it reaches the first only, and its bounds
allow for experts that are chosen otherwise. Lengths are odd, since kernels fail at the ends of their tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from training.attention import segment_attention
from training.attention_blocks import OWN_CALL_FROM_PAIRS, TreeLayout, group_blocks
from training.prefix_tree import Segment

_BOUND = 0.02
"""Largest relative error of output and gradients. On an H100 both kernels have 0.002 to 0.0035 in bfloat16."""
_FORK = [Segment(0, 251, 977, 0, -1), Segment(251, 760, 760, 251, 0), Segment(760, 977, 977, 251, 0)]
_CHAIN = [Segment(0, 263, 263, 0, -1)]


class Heads(NamedTuple):
    """Numbers of query and key heads, and the size of each."""

    queries: int
    keys: int
    size: int


def kernel_errors(
    heads: Heads,
    segments: Sequence[Segment],
    dtype: torch.dtype,
    device: torch.device,
    own_call_from_pairs: int | None,
    side_by_side: bool = False,
) -> dict[str, float]:
    """Return the relative errors of output and gradients, against the plain formula in float32.

    `side_by_side`: query, key and value are views of one tensor, as ranks that share a bin have them.
    """
    inputs, grad = _inputs(heads, segments[0].subtree_end, dtype, device)
    if side_by_side:
        rows = torch.cat([part[0].transpose(0, 1) for part in inputs], 1)
        sizes = [part.shape[1] for part in inputs]
        inputs = [part.transpose(0, 1)[None] for part in torch.split(rows, sizes, 1)]
    found = _results(inputs, grad, segments, own_call_from_pairs)
    expected = _results([part.float() for part in inputs], grad.float(), segments, None)
    names = ("output", "query", "key", "value")
    return {name: _relative(one, other) for name, one, other in zip(names, found, expected, strict=True)}


def why_no_own_calls(heads: Heads, dtype: torch.dtype, device: torch.device, side_by_side: bool = False) -> str | None:
    """Return why large blocks must not have kernels of their own on this device, None if they may."""
    try:
        for segments in (_FORK, _CHAIN):
            errors = kernel_errors(heads, segments, dtype, device, 0, side_by_side)
            name, error = max(errors.items(), key=lambda one: one[1])
            if not error <= _BOUND:
                return f"the {name} of a block of up to {segments[0].end} tokens has a relative error of {error:.2g}"
        return _why_not_at_size(heads, dtype, device) if device.type != "cpu" else None
    except RuntimeError as error:  # cuDNN has no kernel for the card or the sizes
        return str(error)[:300]


def _why_not_at_size(heads: Heads, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare both kernels on a block of the smallest size that has its own: the formula needs too much memory."""
    length = int((2 * OWN_CALL_FROM_PAIRS) ** 0.5) | 1
    segments = [Segment(0, length, length, 0, -1)]
    inputs, grad = _inputs(heads, length, dtype, device)
    alone, together = (_results(inputs, grad, segments, pairs) for pairs in (0, None))
    error = max(_relative(one, other) for one, other in zip(alone, together, strict=True))
    return None if error <= _BOUND else f"the two kernels differ by {error:.2g} on a block of {length} tokens"


def _inputs(heads: Heads, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, and the gradient of the output. Drawn in float32, so alike for every dtype."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, num, num_tokens, heads.size) for num in (heads.queries, heads.keys, heads.keys)]
    grad = torch.randn((1, num_tokens, heads.queries, heads.size), device=device, generator=generator)
    return [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes], grad.to(dtype)


def _results(
    inputs: Sequence[Tensor], grad: Tensor, segments: Sequence[Segment], own_call_from_pairs: int | None
) -> list[Tensor]:
    query, key, value = (part.detach().requires_grad_() for part in inputs)
    tree = TreeLayout(segments, group_blocks(segments, grad.device, own_call_from_pairs))
    with torch.enable_grad():
        out, _ = segment_attention(torch.nn.Module(), query, key, value, None, tree=tree)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
