"""The part of a bin that one rank computes: all of it, or a slice of its tokens if ranks share the bin.

It is made once per bin, on the host, for the policy, its reference and its teacher.

Shape legend: B = rows of a bin, T = its length, P = ranks that share it, S = T / P, rounded up, M = its predictions,
m = those of one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratchet.routed_experts import RoutedExperts
from training.packing import Bin
from training.prefix_tree import Segment
from training.router_replay import RecordedExperts
from training.sequence_parallel import Joining, SequenceRanks


@dataclass(slots=True, frozen=True)
class PolicyInputs:
    """Tensors of one forward pass on the rank's device.

    `ids` (B, T) and `positions` (1, T), or (1, S) of a slice; padded rows have no positions and no segments. `segments`
    are those of all T tokens. `sources` and `targets` (M,) or (m,): predicted tokens, and after which of the flat
    `ids`. `experts`: of the tokens. `joining`: how the ranks that share the bin join their predictions, None for a
    whole bin.
    """

    ids: Tensor
    positions: Tensor | None
    segments: Sequence[Segment] | None
    sources: Tensor
    targets: Tensor
    experts: RecordedExperts | None = None
    joining: Joining | None = None


def make_inputs(bin: Bin, device: torch.device, ranks: SequenceRanks | None = None) -> PolicyInputs:
    """Return what this rank computes of a bin, which it shares with `ranks`."""

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    joining = None
    if ranks is not None:
        owners = bin.sources // slice_length(bin.ids.shape[1], ranks.size)
        order = np.argsort(owners, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        joining = Joining(ranks, np.bincount(owners, minlength=ranks.size).tolist(), tensor(places))
        bin = _own_tokens(bin, owners == ranks.number, ranks)
    return PolicyInputs(
        tensor(bin.ids),
        None if bin.positions is None else tensor(bin.positions),
        bin.segments,
        tensor(bin.sources),
        tensor(bin.targets),
        None if bin.experts is None else RecordedExperts(tensor(bin.experts.ids), tensor(bin.experts.known)),
        joining,
    )


def slice_length(num_tokens: int, num_ranks: int) -> int:
    """Return S, the tokens of a bin that each rank computes."""
    return -(-num_tokens // num_ranks)


def _own_tokens(bin: Bin, is_own: npt.NDArray[np.bool_], ranks: SequenceRanks) -> Bin:
    """Return a rank's slice of a bin, and the predictions (M,) that are its own. A chain of tokens that nothing
    predicts fills up the last slices."""
    assert bin.positions is not None and bin.segments is not None, "padded rows are not shared"
    num_tokens = bin.ids.shape[1]
    num_own = slice_length(num_tokens, ranks.size)
    missing = num_own * ranks.size - num_tokens
    own = slice(ranks.number * num_own, (ranks.number + 1) * num_own)
    ids, positions, segments = np.pad(bin.ids, ((0, 0), (0, missing))), bin.positions, bin.segments
    if missing:
        positions = np.concatenate([positions, np.arange(missing)[None]], 1)
        segments = [*segments, Segment(num_tokens, num_tokens + missing, num_tokens + missing, 0, -1)]
    sources, targets = bin.sources[is_own] - own.start, bin.targets[is_own]
    experts = None
    if bin.experts is not None:
        ids_S, known_S = bin.experts.ids[own], bin.experts.known[own]
        experts = RoutedExperts.unknown(num_own, bin.experts.ids)  # as tokens behind the last one stay
        experts.ids[: len(ids_S)] = ids_S
        experts.known[: len(known_S)] = known_S
    bin = replace(bin, ids=ids[:, own], positions=positions[:, own], segments=segments)
    return replace(bin, sources=sources, targets=targets, experts=experts)
