"""The kernels of segment attention: attention within blocks, with its log-sum-exp, and its backward pass.

    CPU                                   PyTorch's flash attention for CPUs, block by block
    GPU, float32 or wider                 the plain formula, block by block: no flash kernel has it
    GPU, a large block                    cuDNN, if it has a kernel for the card; it is the fastest for Hopper and newer
    GPU, blocks that share a call         flash attention for sequences of different lengths

Every backward kernel gets the output and the log-sum-exp of the whole row, not of the block, so the gradients of a
query's blocks add up.

Shape legend: H = query heads, K = key heads, Q = queries and S = keys of a group's blocks, one after the other, D =
size of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.attention_blocks import BlockGroup

_aten = torch.ops.aten
_CUDNN_HEAD_SIZE = 128
"""cuDNN's backward kernels for Hopper take no larger heads."""


class BlockOutput(NamedTuple):
    """`out` (Q, H, D), `lse` (H, Q) in float32 or wider, and what else the backward kernel needs."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...] = ()


def forward(query: Tensor, key: Tensor, value: Tensor, group: BlockGroup, scale: float) -> BlockOutput:
    """Return the attention of a group's blocks, from query (Q, H, D) and key and value (S, K, D)."""
    if _is_looped(query):
        return _looped_forward(query, key, value, group, scale)
    if group.has_own_call and _cudnn_has(query):
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            *(_with_batch(part) for part in (query, key, value)), None, True, 0.0, group.causal, False, scale=scale
        )
        return BlockOutput(_without_batch(out), lse[0, :, :, 0], (cum_q, cum_k, max_q, max_k, seed, offset))
    out, lse, state, unused, _ = _aten._flash_attention_forward(
        query, key, value, *group.flash_sizes, 0.0, group.causal, False, scale=scale
    )
    return BlockOutput(out, lse, (state, unused))


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: BlockOutput, group: BlockGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `whole`: output and log-sum-exp of these queries over all their blocks, and the `extra` of this group's forward.
    Kernels take the log-sum-exp by its address and do not look at its strides, so it must be contiguous.
    """
    if _is_looped(query):
        return _looped_backward(grad, query, key, value, whole, group, scale)
    assert whole.lse.is_contiguous()
    if group.has_own_call and _cudnn_has(query):
        cum_q, cum_k, max_q, max_k, seed, offset = whole.extra
        given = [_with_batch(part) for part in (grad, query, key, value, whole.out)]
        stats = whole.lse[None, :, :, None]
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            *given, stats, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, group.causal, scale=scale
        )
        d_query, d_key, d_value = (_without_batch(part) for part in found)
        return d_query, d_key, d_value
    found = _aten._flash_attention_backward(
        grad, query, key, value, whole.out, whole.lse, *group.flash_sizes, 0.0, group.causal, *whole.extra, scale=scale
    )
    return found  # type: ignore[no-any-return]


def _is_looped(query: Tensor) -> bool:
    return query.device.type == "cpu" or query.dtype.itemsize > 2


def _cudnn_has(query: Tensor) -> bool:
    return query.shape[-1] <= _CUDNN_HEAD_SIZE and query.shape[-1] % 8 == 0 and _cudnn_is_fast(query.device)


@cache
def _cudnn_is_fast(device: torch.device) -> bool:
    """Return whether the card is a Hopper or newer; on older ones flash attention is as fast."""
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return has_cudnn and torch.cuda.get_device_capability(device)[0] >= 9


def _with_batch(part: Tensor) -> Tensor:
    """(T, H, D) as (1, H, T, D)."""
    return part.transpose(0, 1)[None]


def _without_batch(part: Tensor) -> Tensor:
    """(1, H, T, D) as (T, H, D)."""
    return part[0].transpose(0, 1)


def _looped_forward(query: Tensor, key: Tensor, value: Tensor, group: BlockGroup, scale: float) -> BlockOutput:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[1], len(query), dtype=wide, device=query.device)
    for queries, keys in group.blocks():
        block = (_with_batch(query[queries]), _with_batch(key[keys]), _with_batch(value[keys]))
        if query.device.type == "cpu":
            found = _aten._scaled_dot_product_flash_attention_for_cpu(*block, 0.0, group.causal, scale=scale)
        else:
            found = plain_forward(*block, group.causal, scale)
        out[queries] = _without_batch(found[0])
        lse[:, queries] = found[1][0]
    return BlockOutput(out, lse)


def _looped_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: BlockOutput, group: BlockGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_query, d_key, d_value = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (query, key, value)
    )
    for queries, keys in group.blocks():
        of_queries = (_with_batch(grad[queries]), _with_batch(query[queries]))
        block = (*of_queries, _with_batch(key[keys]), _with_batch(value[keys]))
        known = (_with_batch(whole.out[queries]), whole.lse[None, :, queries])
        if query.device.type == "cpu":
            found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *block, *known, 0.0, group.causal, scale=scale
            )
        else:
            found = plain_backward(*block, *known, group.causal, scale)
        d_query[queries], d_key[keys], d_value[keys] = (_without_batch(part) for part in found)
    return d_query, d_key, d_value


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scores of the plain formula; it and those below take tensors of (1, H, T, D)."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    return scores


def plain_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output (1, H, Q, D) and log-sum-exp (1, H, Q): what the kernels compute; a reference in tests, too."""
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), lse


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1] // key.shape[1]
    weights = (_scores(query, key, causal, scale) - lse[..., None]).exp()
    d_scores = (
        weights
        * (grad @ value.repeat_interleave(heads, 1).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        * scale
    )
    d_key = d_scores.transpose(-1, -2) @ query
    d_value = weights.transpose(-1, -2) @ grad
    d_query = d_scores @ key.repeat_interleave(heads, 1)
    shape = (1, key.shape[1], heads, *key.shape[2:])
    return d_query, d_key.reshape(shape).sum(2), d_value.reshape(shape).sum(2)
