"""The blocks of a prefix tree's attention, grouped into few kernel calls.

In depth-first order the descendants of a segment are contiguous. So a segment's keys meet two blocks of queries: its
own (causal) and its descendants' (all pairs). The own blocks of all segments have disjoint queries, and so have the
descendants' blocks of segments at one depth. Blocks with disjoint queries share a call, so a tree needs one call, and
one more for each depth that has descendants, however many segments it has. Large blocks have a call of their own, for
which a GPU may have a faster kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from training.prefix_tree import Segment
from training.sequence_parallel import SequenceRanks

OWN_CALL_FROM_PAIRS = 1 << 25
"""On a GPU a block with at least so many pairs of a query and a key has a call of its own. cuDNN plans each new shape
for 0.1 s (on an H100), and saves as much in a step of a model of 0.6B with a block of this size."""

TreeRows: TypeAlias = "slice | Tensor"
"""Rows of the tree: a slice if they are contiguous, else their indexes."""
_Range: TypeAlias = "tuple[int, int]"


@dataclass(slots=True, frozen=True)
class BlockGroup:
    """Blocks of disjoint queries that one kernel call computes.

    `query_ends`, `key_ends`: the ends of the blocks among the group's queries and keys, with a 0 in front.
    `flash_sizes`: the same as int32 tensors on the device of the kernels, and the largest number of queries and of keys
    in a block. `has_own_call`: the group is one large block, for which a GPU may have another kernel.
    """

    queries: TreeRows
    keys: TreeRows
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    flash_sizes: tuple[Tensor, Tensor, int, int]
    causal: bool
    has_own_call: bool

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield (queries, keys) of each block, as ranges of the group's own."""
        for queries, keys in zip(pairwise(self.query_ends), pairwise(self.key_ends), strict=True):
            yield slice(*queries), slice(*keys)


class TreeLayout:
    """The data of a tree that every layer reads: its segments, the groups of their blocks, and the ranks that share it.

    It is no dataclass and no tuple. FSDP looks through those in the inputs of every layer, and copies them if it casts,
    which was most of the Python calls of a step.
    """

    __slots__ = ("groups", "ranks", "segments")

    def __init__(
        self, segments: Sequence[Segment], groups: Sequence[BlockGroup], ranks: SequenceRanks | None = None
    ) -> None:
        self.segments = segments
        self.groups = groups
        self.ranks = ranks


def group_blocks(
    segments: Sequence[Segment], device: torch.device, own_call_from_pairs: int | None = None
) -> list[BlockGroup]:
    """Return the groups of a tree's blocks; those with every segment's own tokens come first and are causal.

    Blocks with at least `own_call_from_pairs` pairs of a query and a key have groups of their own; None: no block has.
    """
    own = [((one.start, one.end), (one.start, one.end)) for one in segments]
    depths: list[int] = []
    below: dict[int, list[tuple[_Range, _Range]]] = {}
    for one in segments:
        depths.append(depths[one.parent] + 1 if one.parent >= 0 else 0)
        if one.subtree_end > one.end:
            below.setdefault(depths[-1], []).append(((one.end, one.subtree_end), (one.start, one.end)))
    groups = list(_groups(own, True, device, own_call_from_pairs))
    for depth in sorted(below):
        groups += _groups(below[depth], False, device, own_call_from_pairs)
    return groups


def _groups(
    blocks: Sequence[tuple[_Range, _Range]], causal: bool, device: torch.device, own_call_from_pairs: int | None
) -> Iterator[BlockGroup]:
    together = []
    for block in blocks:
        num_queries, num_keys = (end - start for start, end in block)
        if own_call_from_pairs is not None and num_queries * num_keys // (1 + causal) >= own_call_from_pairs:
            yield _group([block], causal, device, has_own_call=True)
        else:
            together.append(block)
    if together:
        yield _group(together, causal, device, has_own_call=False)


def _group(
    blocks: Sequence[tuple[_Range, _Range]], causal: bool, device: torch.device, has_own_call: bool
) -> BlockGroup:
    queries, keys = ([block[side] for block in blocks] for side in (0, 1))
    query_ends, key_ends = (
        tuple(accumulate((end - start for start, end in ranges), initial=0)) for ranges in (queries, keys)
    )
    offsets = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (query_ends, key_ends)]
    longest = [max(end - start for start, end in ranges) for ranges in (queries, keys)]
    sizes = (offsets[0], offsets[1], longest[0], longest[1])
    return BlockGroup(_rows(queries, device), _rows(keys, device), query_ends, key_ends, sizes, causal, has_own_call)


def _rows(ranges: Sequence[_Range], device: torch.device) -> TreeRows:
    if all(end == start for (_, end), (start, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(start, end) for start, end in ranges]).to(device)
