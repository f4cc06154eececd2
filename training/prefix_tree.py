"""Build a prefix tree of chains, in which tokens with the same prefix are computed once. numpy only.

A causal model's output for a token depends only on the tokens before it, so sharing is exact. A node of the tree
holds an id and a position. Mask, advantage, recorded logprob and weight belong to (chain, position): two rollouts may
share sampled tokens and differ in all of these.
"""

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


def build_tree(chains: Sequence[TokenIds], shared: Sequence[int]) -> PrefixTree:
    """Build the tree of chains in depth-first order, none of them empty.

    `shared`: per chain, the length of its prefix that it shares with the chain before it; 0 keeps the two apart.
    """
    starts, nodes, before = set(), [np.empty(0, np.int64)], []  # `before`: per new token the one that it continues
    num_tokens = 0
    for chain, common, last in zip(chains, shared, (chains[0], *chains), strict=False):
        path, new = nodes[-1][:common], np.arange(num_tokens, num_tokens + len(chain) - common)
        if not common or common < len(last):  # else the chain goes on where the last one ends
            starts |= {*new[:1].tolist(), *nodes[-1][common : common + 1].tolist()}
        nodes.append(np.concatenate([path, new]))
        before += [path[-1:] if common else [-1], new[:-1]] if len(new) else []
        num_tokens += len(new)
    start = np.array(sorted(starts))
    end = np.append(start[1:], num_tokens)
    parent = np.searchsorted(start, np.concatenate(before)[start], side="right") - 1
    subtree_end = end.copy()
    for number in range(len(start) - 1, -1, -1):  # children come after their parents
        if parent[number] >= 0:
            subtree_end[parent[number]] = max(subtree_end[parent[number]], subtree_end[number])
    ids = np.concatenate([chain[common:] for chain, common in zip(chains, shared, strict=True)])
    positions = np.concatenate([np.arange(common, len(chain)) for chain, common in zip(chains, shared, strict=True)])
    rows = np.stack([start, end, subtree_end, positions[start], parent], 1).tolist()
    return PrefixTree(ids.astype(np.int64), positions, [Segment(*row) for row in rows], nodes[1:])
