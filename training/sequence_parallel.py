"""Sequence parallelism: ranks divide the tokens of one bin among them (DeepSpeed-Ulysses, arXiv 2309.14509).

A rank computes its slice of the tokens alone (`training/policy_inputs.py`), but for the layers that mix tokens. These
get all tokens of a share of the heads by one all-to-all, and a second one brings the results back to the tokens' ranks.
Attention and Gated DeltaNet over a prefix tree are thus the ones of a single rank, with fewer heads.

    8 ranks, sequence_parallel 4: ranks 0 to 3 compute one bin, each a quarter of it, and ranks 4 to 7 compute another

Shape legend: P = ranks that share a bin, S = tokens of one rank, T = P x S, C = channels, by heads, M = predictions of
the bin, m = those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks that share a bin. `number`: of this rank among the `size` of them."""

    group: dist.ProcessGroup
    number: int
    size: int

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Return (T, sum of C / P) from (S, C) of each part: this rank's share of each part's heads, for the tokens of
        all ranks."""
        shares = [part.view(len(part), self.size, -1).transpose(0, 1) for part in parts]
        received_PSC: Tensor = _AllToAll.apply(torch.cat(shares, 2), self.group)  # type: ignore[no-untyped-call]
        return received_PSC.flatten(0, 1)

    def to_tokens(self, heads_TC: Tensor) -> Tensor:
        """Return (S, C) from (T, C / P): all heads, for this rank's tokens."""
        sent_PSC = heads_TC.reshape(self.size, -1, heads_TC.shape[1]).contiguous()
        received_PSC: Tensor = _AllToAll.apply(sent_PSC, self.group)  # type: ignore[no-untyped-call]
        return received_PSC.transpose(0, 1).flatten(1)

    def own_share(self, per_head: Tensor) -> Tensor:
        """Return this rank's share of a parameter whose first dimension is heads, or channels by heads."""
        return per_head.chunk(self.size)[self.number]


@dataclass(frozen=True, slots=True)
class Joining:
    """Join the values of all ranks' predictions. `counts`: number of predictions of each rank. `places` (M,): for each
    prediction of the bin, its index in the concatenated predictions of all ranks."""

    ranks: SequenceRanks
    counts: Sequence[int]
    places: Tensor

    def join(self, *values: Tensor) -> list[Tensor]:
        """Return values of the bin's predictions, (M,) each, from those of this rank's, (m,) each.

        Every rank then computes the same loss. The gradient of a rank's own values is multiplied by P: FSDP2 averages
        over the ranks, and the average over those of a bin is then its gradient.
        """
        joined = _Join.apply(self.ranks, self.counts, *values)  # type: ignore[no-untyped-call]
        return [one[self.places] for one in joined]


class _AllToAll(torch.autograd.Function):
    """Send part p of (P, ...) to rank p; gradients travel back in the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0].contiguous(), ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, counts: Sequence[int], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.counts = counts
        ctx.set_materialize_grads(False)  # so that an entropy without a gradient stays without one
        own = torch.stack(values)
        filled = torch.nn.functional.pad(own, (0, max(counts) - own.shape[1]))
        found = [torch.empty_like(filled) for _ in counts]
        dist.all_gather(found, filled, group=ranks.group)
        joined = torch.cat([one[:, :count] for one, count in zip(found, counts, strict=True)], 1)
        return joined.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        own = [None if grad is None else torch.split(grad, ctx.counts)[ranks.number] * ranks.size for grad in grads]
        return None, None, *own


def make_sequence_ranks(size: int) -> SequenceRanks | None:
    """Divide all ranks into groups of `size` consecutive ones and return this rank's, None for a size of 1. A
    collective.

    Raises ValueError if the number of ranks is not a multiple of `size`.
    """
    if size == 1:
        return None
    if (reason := why_no_groups(dist.get_world_size(), size)) is not None:
        raise ValueError(f"training.sequence_parallel: {reason}; use another number, or leave it out")
    group, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]
    assert group is not None
    return SequenceRanks(group, dist.get_rank() % size, size)


def why_no_groups(num_ranks: int, size: int) -> str | None:
    """Return why the ranks cannot be divided into groups of `size`, None if they can."""
    return f"{size} does not divide the number of ranks, {num_ranks}" if num_ranks % size else None


def why_no_sequence_parallel(model: Any, size: int) -> str | None:
    """Return why so many ranks cannot share a bin of this model of transformers, whose prefixes can be shared; None if
    they can."""
    settings = model.config
    name = type(model).__name__
    if settings.num_attention_heads % size:
        return f"{size} does not divide the attention heads of {name}, {settings.num_attention_heads}"
    kv_heads = settings.num_key_value_heads
    if kv_heads % size and size % kv_heads:
        return f"{size} neither divides the key and value heads of {name}, {kv_heads}, nor is a multiple of them"
    for heads in ("linear_num_key_heads", "linear_num_value_heads"):  # of Gated DeltaNet
        number = getattr(settings, heads, None)
        if number is not None and number % size:
            return f"{size} does not divide {heads} of {name}, {number}"
    return None
