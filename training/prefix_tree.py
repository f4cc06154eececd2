"""Build a prefix tree of chains, in which tokens with the same prefix are computed once. numpy only.

A causal model's output for a token depends only on the tokens before it, so sharing is exact. A node of the tree
holds an id and a position. Mask, advantage, recorded logprob and weight belong to (chain, position): two rollouts may
share sampled tokens and differ in all of these.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Segment:
    """A run of tokens without a fork, in the tree's depth-first order.

    Its tokens are [start, end) of the tree, and those of its descendants [end, subtree_end). `position`: position of
    its first token in its chains. `parent`: number of the segment that it continues, -1 for a root.
    """

    start: int
    end: int
    subtree_end: int
    position: int
    parent: int


@dataclass(slots=True, frozen=True)
class PrefixTree:
    """`ids` and `positions`: (T,) in depth-first order. `nodes[c]`: indices of chain c's tokens in them, in order."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    segments: list[Segment]
    nodes: list[npt.NDArray[np.int64]]


def depth_first(chains: Sequence[TokenIds]) -> list[int]:
    """Return the lexicographic order of the chains, in which chains with a common prefix are neighbours."""
    return sorted(range(len(chains)), key=lambda number: chains[number].astype(">i4").tobytes())


def shared_tokens(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class _Builder:
    """Splits chains in depth-first order into segments, with a stack of chain ranges instead of recursion."""

    def __init__(self, chains: Sequence[TokenIds], shared: Sequence[int]) -> None:
        self.chains = chains
        self.shared = shared
        self.starts: list[tuple[int, int, int, int]] = []  # start, end, position, parent
        self.paths: list[list[int]] = [[] for _ in chains]
        self.num_tokens = 0

    def build(self) -> None:
        """Emit the segments of all chains, depth-first."""
        stack = [(0, len(self.chains), 0, -1)]
        while stack:
            first, last, position, parent = stack.pop()
            common = min(self.shared[first + 1 : last], default=len(self.chains[first]))
            emitted = parent
            if common > position:
                self._emit(first, last, position, common, parent)
                emitted = len(self.starts) - 1
            while first < last and len(self.chains[first]) == common:
                first += 1  # this chain ends here; the shortest come first
            stack += [(one, other, common, emitted) for one, other in reversed(self._ranges(first, last, common))]

    def _ranges(self, first: int, last: int, common: int) -> list[tuple[int, int]]:
        """Return runs of chains that share more than `common` tokens with their neighbours."""
        if first >= last:
            return []
        cuts = [first, *(n for n in range(first + 1, last) if self.shared[n] <= common), last]
        return list(itertools.pairwise(cuts))

    def _emit(self, first: int, last: int, position: int, end: int, parent: int) -> None:
        for chain in range(first, last):
            self.paths[chain].append(len(self.starts))
        self.starts.append((self.num_tokens, self.num_tokens + end - position, position, parent))
        self.num_tokens += end - position

    def segments(self) -> list[Segment]:
        """Return the emitted segments with the ends of their subtrees."""
        ends = [end for _, end, _, _ in self.starts]
        for number in range(len(self.starts) - 1, -1, -1):
            parent = self.starts[number][3]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[number])
        return [
            Segment(start, end, ends[n], position, parent)
            for n, (start, end, position, parent) in enumerate(self.starts)
        ]


def build_tree(chains: Sequence[TokenIds], shared: Sequence[int]) -> PrefixTree:
    """Build the tree of chains in depth-first order, none of them empty.

    `shared`: per chain, the length of its prefix that it shares with the chain before it; 0 keeps the two apart.
    """
    builder = _Builder(chains, shared)
    builder.build()
    segments = builder.segments()
    ids = np.empty(builder.num_tokens, dtype=np.int64)
    positions = np.empty(builder.num_tokens, dtype=np.int64)
    nodes = []
    for chain, path in zip(chains, builder.paths, strict=True):
        nodes.append(np.concatenate([np.arange(segments[n].start, segments[n].end) for n in path]))
        ids[nodes[-1]] = chain
        positions[nodes[-1]] = np.arange(len(chain))
    return PrefixTree(ids, positions, segments, nodes)
