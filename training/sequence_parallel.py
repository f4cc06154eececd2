"""Sequence parallelism: ranks divide the tokens of one bin among them (DeepSpeed-Ulysses, arXiv 2309.14509).

A rank computes its slice of the tokens alone, but for the layers that mix tokens. These get all tokens of a share of
the heads by one all-to-all, and a second one brings the results back to the tokens' ranks. Attention and Gated DeltaNet
over a prefix tree are thus the ones of a single rank, with fewer heads.

    8 ranks, sequence_parallel 4: ranks 0 to 3 compute one bin, each a quarter of it, and ranks 4 to 7 compute another

Shape legend: P = ranks that share a bin, T = tokens of the bin, a multiple of P, S = T / P, C = channels, by heads,
M = predictions of the bin, m = those of one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from training.prefix_tree import Segment


class SequenceSlice(NamedTuple):
    """What one rank computes of a bin: `ids` and `positions` (1, S), of its tokens; `segments`, of all T tokens.

    `own`: its tokens among the T. `sources` and `targets` (m,): the predictions after its own tokens, counted from its
    first one. `counts`: number of predictions of each rank. `places` (M,): of each prediction of the bin, its index in
    those of all ranks in a row.
    """

    own: slice
    ids: Tensor
    positions: Tensor
    segments: Sequence[Segment]
    sources: Tensor
    targets: Tensor
    counts: Sequence[int]
    places: Tensor


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks that share a bin. `number`: of this rank among the `size` of them."""

    group: dist.ProcessGroup
    number: int
    size: int

    def cut(
        self,
        ids_1T: Tensor,
        positions_1T: Tensor,
        segments: Sequence[Segment],
        source_M: Tensor,
        target_M: Tensor,
    ) -> SequenceSlice:
        """Return this rank's slice of a bin. The last slice is filled up with a chain of tokens that none predicts."""
        num_tokens = ids_1T.shape[1]
        num_own = -(-num_tokens // self.size)
        own = slice(self.number * num_own, (self.number + 1) * num_own)
        missing = num_own * self.size - num_tokens
        if missing:
            segments = [*segments, Segment(num_tokens, num_tokens + missing, num_tokens + missing, 0, -1)]
            ids_1T = torch.nn.functional.pad(ids_1T, (0, missing))
            filling = torch.arange(missing, device=positions_1T.device)[None]
            positions_1T = torch.cat([positions_1T, filling], 1)
        owner_M = source_M // num_own
        order_M = owner_M.argsort(stable=True)
        places_M = torch.empty_like(order_M)
        places_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        mine = owner_M == self.number
        counts = torch.bincount(owner_M, minlength=self.size).tolist()
        ids, positions = ids_1T[:, own], positions_1T[:, own]
        sources, targets = source_M[mine] - own.start, target_M[mine]
        return SequenceSlice(own, ids, positions, segments, sources, targets, counts, places_M)

    def gather(self, values: Sequence[Tensor], part: SequenceSlice) -> list[Tensor]:
        """Return values of the bin's predictions, (M,) each, from those of this rank's, (m,) each.

        The gradient of a rank's own values is multiplied by P: FSDP2 averages over the ranks, and the average over
        those of a bin is then its gradient.
        """
        gathered: Tensor = _Gather.apply(torch.stack(list(values)), self, part.counts)  # type: ignore[no-untyped-call]
        return [one[part.places] for one in gathered]

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return (T, C / P) for each (S, C): this rank's share of the heads, for the tokens of all ranks."""
        widths = [part.shape[1] // self.size for part in parts]
        shares = [part.view(len(part), self.size, width) for part, width in zip(parts, widths, strict=True)]
        sent_PSC = torch.cat(shares, 2).transpose(0, 1).contiguous()
        received_PSC: Tensor = _AllToAll.apply(sent_PSC, self.group)  # type: ignore[no-untyped-call]
        return list(torch.split(received_PSC.flatten(0, 1), widths, 1))

    def to_tokens(self, heads_TC: Tensor) -> Tensor:
        """Return (S, C) from (T, C / P): all heads, for this rank's tokens."""
        sent_PSC = heads_TC.reshape(self.size, -1, heads_TC.shape[1])
        received_PSC: Tensor = _AllToAll.apply(sent_PSC.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return received_PSC.transpose(0, 1).flatten(1)

    def own_share(self, per_head: Tensor) -> Tensor:
        """Return this rank's share of a parameter whose first dimension is heads, or channels by heads."""
        return per_head.chunk(self.size)[self.number]


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


class _Gather(torch.autograd.Function):
    """Join the last dimension of all ranks' tensors; every rank then computes the same, so gradients are not summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: SequenceRanks, counts: Sequence[int]) -> Tensor:
        ctx.ranks = ranks
        ctx.counts = counts
        filled = torch.nn.functional.pad(values, (0, max(counts) - values.shape[-1]))
        found = [torch.empty_like(filled) for _ in counts]
        dist.all_gather(found, filled, group=ranks.group)
        return torch.cat([one[..., :count] for one, count in zip(found, counts, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        own = torch.split(grads[0], ctx.counts, -1)[ctx.ranks.number]
        return own * ctx.ranks.size, None, None


# ---------------------------------------------------------------- which ranks, and which models


def make_sequence_ranks(device_type: str, size: int) -> SequenceRanks | None:
    """Divide all ranks into groups of `size` consecutive ones and return this rank's, None for a size of 1. A
    collective.

    Raises ValueError if the number of ranks is not a multiple of `size`.
    """
    if size == 1:
        return None
    world_size = dist.get_world_size()
    if world_size % size:
        raise ValueError(
            f"training.sequence_parallel: {size} does not divide the number of ranks, {world_size}; "
            "use another number, or leave it out"
        )
    mesh = init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("bin", "sequence"))["sequence"]
    return SequenceRanks(mesh.get_group(), mesh.get_local_rank(), size)


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
