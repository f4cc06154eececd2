"""Segment attention: every token of a prefix tree attends to its ancestors and to itself, exactly, without a mask.

One forward pass can hold many chains, with shared prefixes once, on any architecture whose layers mix tokens by
attention only. transformers calls it under the name `ratchet_segments`, which `training/policy_model.py` sets.

In depth-first order the descendants of a segment are contiguous. So a segment's keys meet two blocks of queries: its
own (causal) and its descendants' (all pairs). Each block is an ordinary flash attention call. Blocks of one query are
merged by their log-sum-exps, as ring attention does (arXiv 2310.01889). The backward of each block is the kernel's
own, given the merged output and log-sum-exp. Packed chains are the special case in which no segment has descendants.

Shape legend: H = query heads, K = key heads, T = tokens of the tree, D = size of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from training.prefix_tree import Segment

NAME = "ratchet_segments"
_aten = torch.ops.aten


def _block_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return the block's output, its log-sum-exp in float32 or wider, and further values that its backward needs."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse, ()
    if query.dtype == torch.float32:
        return *_plain_forward(query, key, value, causal, scale), ()
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)


def _block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for one block."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
    if query.dtype == torch.float32:
        return _plain_backward(grad, query, key, value, out, lse, causal, scale)
    cum_q, cum_k, max_q, max_k, seed, offset = extra
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    return scores


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute what the kernels compute, for devices whose flash kernel has no float32, and as a reference in tests."""
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), lse


def _plain_backward(
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


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Sequence[Segment]
    ) -> Tensor:
        """Return (1, H, T, D) from query (1, H, T, D), key and value (1, K, T, D); segments in depth-first order."""
        merged = any(segment.parent >= 0 for segment in segments)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty(query.shape, dtype=wide if merged else query.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        extras: list[tuple[Any, ...]] = []
        for segment in segments:
            for start, end, causal in _blocks(segment):
                rows = slice(start, end)
                keys = slice(segment.start, segment.end)
                inputs = (query[:, :, rows], key[:, :, keys], value[:, :, keys])
                block, block_lse, extra = _block_forward(*inputs, causal, scale)
                extras.append(extra)
                if segment.parent < 0:  # a root's block is the first that its queries meet
                    out[:, :, rows] = block
                    lse[:, :, rows] = block_lse
                else:
                    _merge(out[:, :, rows], lse[:, :, rows], block, block_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        ctx.segments = segments
        ctx.extras = extras
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query, d_key, d_value = (
            torch.zeros(part.shape, dtype=wide, device=part.device) for part in (query, key, value)
        )
        extras = iter(ctx.extras)
        for segment in ctx.segments:
            keys = slice(segment.start, segment.end)
            for start, end, causal in _blocks(segment):
                rows = slice(start, end)
                block = (
                    grad[:, :, rows],
                    query[:, :, rows],
                    key[:, :, keys],
                    value[:, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows].contiguous(),  # flash kernels take its address only, not its strides
                )
                more_query, more_key, more_value = _block_backward(*block, causal, ctx.scale, next(extras))
                d_query[:, :, rows] += more_query
                d_key[:, :, keys] += more_key
                d_value[:, :, keys] += more_value
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _blocks(segment: Segment) -> list[tuple[int, int, bool]]:
    """Return (first query, end of queries, causal) of the blocks that the segment's keys meet."""
    own = (segment.start, segment.end, True)
    return [own, (segment.end, segment.subtree_end, False)] if segment.subtree_end > segment.end else [own]


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge one block into the queries' output and log-sum-exp, in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block * (block_lse - total).exp()[..., None])
    lse.copy_(total)


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: inputs (1, H, T, D), output (1, T, H, D)."""
    assert attention_mask is None and dropout == 0.0 and query.shape[0] == 1, (
        "segments replace the mask; a tree is one row"
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _SegmentAttention.apply(query, key, value, scale, segments)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def register_segment_attention() -> None:
    """Register the function with transformers; registering it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, segment_attention)
