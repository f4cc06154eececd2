"""Segment attention: every token of a prefix tree attends to its ancestors and to itself, exactly, without a mask.

One forward pass can hold many chains, with shared prefixes once, on any architecture whose layers mix tokens by
attention only. transformers calls it under the name `ratchet_segments`, which `training/policy_model.py` sets.

`training/attention_blocks.py` divides the tree's pairs of tokens into blocks and those into groups, each of which is
one ordinary kernel call (`training/attention_kernels.py`). Blocks of one query are merged by their log-sum-exps, as
ring attention does (arXiv 2310.01889). The backward of each group is the kernel's own, given the merged output and
log-sum-exp. Packed chains are the special case in which no segment has descendants.

Shape legend: H = query heads, K = key heads, T = tokens of the tree, D = size of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from training import attention_kernels
from training.attention_blocks import BlockGroup, TreeLayout, TreeRows
from training.attention_kernels import BlockOutput
from training.sequence_parallel import SequenceRanks

NAME = "ratchet_segments"


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, groups: Sequence[BlockGroup]
    ) -> Tensor:
        """Return (T, H, D) from query (T, H, D), key and value (T, K, D)."""
        ctx.scale = scale
        ctx.groups = groups
        if len(groups) == 1:  # one chain, or chains that are packed: nothing is merged
            out, lse, extra = attention_kernels.forward(query, key, value, groups[0], scale)
            ctx.save_for_backward(query, key, value, out, lse.contiguous())
            ctx.extras = [extra]
            return out
        wide = torch.promote_types(query.dtype, torch.float32)
        merged = not all(group.causal for group in groups)
        out = torch.empty(query.shape, dtype=wide if merged else query.dtype, device=query.device)
        lse = torch.empty(query.shape[1], len(query), dtype=wide, device=query.device)
        extras: list[tuple[Any, ...]] = []
        for group in groups:
            rows = group.queries
            block = attention_kernels.forward(query[rows], key[group.keys], value[group.keys], group, scale)
            extras.append(block.extra)
            if group.causal:  # the first block that its queries meet
                _put(out, rows, block.out)
                lse[:, rows] = block.lse
            else:
                _merge(out, lse, rows, block)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.extras = extras
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        if len(ctx.groups) == 1:
            whole = BlockOutput(out, lse, ctx.extras[0])
            return *attention_kernels.backward(grad, query, key, value, whole, ctx.groups[0], ctx.scale), None, None
        wide = torch.promote_types(query.dtype, torch.float32)
        totals = [torch.empty(part.shape, dtype=wide, device=part.device) for part in (query, key, value)]
        for group, extra in zip(ctx.groups, ctx.extras, strict=True):
            rows, keys = group.queries, group.keys
            whole = BlockOutput(out[rows], lse[:, rows].contiguous(), extra)
            given = (grad[rows], query[rows], key[keys], value[keys])
            parts = attention_kernels.backward(*given, whole, group, ctx.scale)
            for total, part, own in zip(totals, parts, (rows, keys, keys), strict=True):
                # Causal groups come first, and together have every row once.
                (_put if group.causal else _add)(total, own, part)
        d_query, d_key, d_value = (
            total.to(part.dtype) for total, part in zip(totals, (query, key, value), strict=True)
        )
        return d_query, d_key, d_value, None, None


def _merge(out: Tensor, lse: Tensor, rows: TreeRows, block: BlockOutput) -> None:
    """Merge one group into its queries' output (T, H, D) and log-sum-exp (H, T), in place."""
    before = lse[:, rows]
    added = (block.lse - before).sigmoid().transpose(0, 1)[..., None]
    out[rows] = torch.lerp(out[rows], block.out.to(out.dtype), added)
    lse[:, rows] = torch.logaddexp(before, block.lse)


def _put(total: Tensor, rows: TreeRows, part: Tensor) -> None:
    """Write `part` to these rows of `total`, whose dtype it may not have; a slice is written and cast by one kernel."""
    total[rows] = part if isinstance(rows, slice) else part.to(total.dtype)


def _add(total: Tensor, rows: TreeRows, part: Tensor) -> None:
    """Add `part` to these rows of `total`; no row is named twice."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: inputs (1, H, T, D), output (1, T, H, D).

    If ranks share the tree, T counts a rank's slice of its tokens.
    """
    assert attention_mask is None and dropout == 0.0 and query.shape[0] == 1, (
        "segments replace the mask; a tree is one row"
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    if tree.ranks is not None:
        rows = _to_heads(rows, tree.ranks)
    out: Tensor = _SegmentAttention.apply(*rows, scale, tree.groups)  # type: ignore[no-untyped-call]
    if tree.ranks is not None:
        out = tree.ranks.to_tokens(out.flatten(1)).view(query.shape[2], -1, query.shape[3])
    return out[None], None


def _to_heads(rows: Sequence[Tensor], ranks: SequenceRanks) -> list[Tensor]:
    """Exchange tokens for heads; a key head that the query heads of several ranks need goes to each of them."""
    query, key, value = rows
    copies = max(1, ranks.size // key.shape[1])
    whole = [query, *(part.repeat_interleave(copies, 1) for part in (key, value))]
    shares = ranks.to_heads([part.flatten(1) for part in whole])
    widths = [part.shape[1] * part.shape[2] // ranks.size for part in whole]
    parts = torch.split(shares, widths, 1)
    return [part.view(len(part), -1, query.shape[2]) for part in parts]
