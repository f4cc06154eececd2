"""Pack chains into bins: which rank computes a chain, which chains share a forward pass, and which tokens are trained.

No gradient depends on the packing. numpy only.

    chains -> depth-first order -> one contiguous share per rank, equal in work -> bins within the token budget

tree    equal prefixes are computed once per bin, also across tasks, rollouts and chains; a tree larger than a bin is
        split by its leaves, and the path above them is computed again
packed  chains side by side, nothing shared, nothing padded
padded  chains as rows of one rectangle, for architectures without segment attention
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from training.plan_types import TrainingSequence
from training.prefix_tree import Segment, build_tree, depth_first, shared_tokens

Packing = Literal["tree", "packed", "padded"]

_SAME_WORK = 1.01
"""Precision of the heaviest rank's share, as a factor."""


@dataclass(slots=True, frozen=True)
class Bin:
    """One forward pass over `ids` (B, T).

    In a forest B is 1, and `segments` and `positions` (1, T) define which tokens attend to which. In a padded bin
    both are None, and every row is one chain, padded on the right with 0.

    M predicted tokens: `targets` (M,) are predicted at `sources` (M,), flat indices into `ids`. N trained tokens, one
    per (chain, position): trained token n reads prediction `predictions[n]` and was sampled with logprob
    `behaviour[n]` in turn `turn_ids[n]` of rollout `rollout_ids[n]` by the weights of `policy_steps[n]` (-1 if
    unknown); in its chain it stands at `chain_positions[n]`. N > M if rollouts share sampled tokens.
    `num_chain_tokens`: tokens of the chains, each counted in full.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    segments: list[Segment] | None
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    predictions: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.float32]
    rollout_ids: npt.NDArray[np.int64]
    turn_ids: npt.NDArray[np.int64]
    chain_positions: npt.NDArray[np.int64]
    policy_steps: npt.NDArray[np.int32]
    temperature: float
    num_chain_tokens: int

    @property
    def num_pairs(self) -> int:
        """Return the (query, key) pairs of one attention layer; a causal block counts in full, as in model FLOPs."""
        if self.segments is None:
            return int(self.ids.shape[0] * self.ids.shape[1] ** 2)
        return sum((one.end - one.start) * (one.subtree_end - one.start) for one in self.segments)


# ---------------------------------------------------------------- shares of the ranks


def split_among_ranks(
    sequences: Sequence[TrainingSequence], num_ranks: int, packing: Packing, pair_cost: float
) -> list[list[TrainingSequence]]:
    """Return each rank's chains, in the order in which they go into bins. Deterministic.

    Shares are contiguous, so that neighbours still share their prefixes, and about equal in work. `pair_cost`: the cost
    of one (query, key) pair in units of one token's linear layers.
    """
    ordered = _ordered(sequences, packing)
    if num_ranks == 1:
        return [ordered]
    shared = _shared(ordered, packing)
    low = 0.0
    high = sum(_work(len(one.ids), 0, pair_cost) for one in ordered)
    best = _shares(ordered, shared, high, pair_cost)
    while high > low * _SAME_WORK and high - low > 1:
        middle = (low + high) / 2
        shares = _shares(ordered, shared, middle, pair_cost)
        if len(shares) <= num_ranks:
            best = shares
            high = middle
        else:
            low = middle
    return best + [[] for _ in range(num_ranks - len(best))]


def _ordered(sequences: Sequence[TrainingSequence], packing: Packing) -> list[TrainingSequence]:
    """Sort by temperature, then depth-first, or longest first if rows are padded."""
    if packing == "padded":
        return sorted(sequences, key=lambda one: (one.temperature, -len(one.ids)))
    in_tree = [sequences[number] for number in depth_first([one.ids for one in sequences])]
    return sorted(in_tree, key=lambda one: one.temperature)


def _shared(ordered: Sequence[TrainingSequence], packing: Packing) -> list[int]:
    """Return, per chain, how many of its tokens are computed with the chain before it."""
    if packing != "tree":
        return [0] * len(ordered)
    pairs = itertools.pairwise(ordered)
    later = [shared_tokens(one.ids, other.ids) if one.temperature == other.temperature else 0 for one, other in pairs]
    return [0, *later][: len(ordered)]


def _work(num_tokens: int, num_shared: int, pair_cost: float) -> float:
    """Return the work of the tokens after the first `num_shared`: linear layers, and causal pairs."""
    new = num_tokens - num_shared
    return new + pair_cost * new * (num_tokens + num_shared + 1) / 2


def _shares(
    ordered: Sequence[TrainingSequence], shared: Sequence[int], limit: float, pair_cost: float
) -> list[list[TrainingSequence]]:
    """Split into as few contiguous shares as possible of at most `limit` work; a larger chain is a share of its own."""
    shares: list[list[TrainingSequence]] = []
    work = 0.0
    for one, num_shared in zip(ordered, shared, strict=True):
        more = _work(len(one.ids), num_shared, pair_cost)
        if shares and work + more <= limit:
            shares[-1].append(one)
            work += more
        else:
            shares.append([one])
            work = _work(len(one.ids), 0, pair_cost)
    return shares


# ---------------------------------------------------------------- bins


def make_bins(sequences: Sequence[TrainingSequence], bin_tokens: int, packing: Packing) -> list[Bin]:
    """Pack a rank's chains, in the order of `split_among_ranks`, into bins of at most `bin_tokens` tokens with padding.

    Raises ValueError for a chain that is longer than a bin; no chain is truncated.
    """
    shared = _shared(sequences, packing)
    bins: list[list[int]] = []
    size = longest = 0
    for number, (one, num_shared) in enumerate(zip(sequences, shared, strict=True)):
        length = len(one.ids)
        if length > bin_tokens:
            raise ValueError(
                f"a chain of rollout {one.rollout_id} has {length} tokens, more than training.bin_tokens ({bin_tokens})"
            )
        together = bool(bins) and sequences[bins[-1][-1]].temperature == one.temperature
        grown = (
            (len(bins[-1]) + 1) * max(longest, length) if bins and packing == "padded" else size + length - num_shared
        )
        if together and grown <= bin_tokens:
            bins[-1].append(number)
            size = grown
            longest = max(longest, length)
        else:
            bins.append([number])
            size = longest = length
    pack = _padded_bin if packing == "padded" else _forest_bin
    return [pack([sequences[n] for n in part], [shared[n] for n in part]) for part in bins]


def _forest_bin(chains: Sequence[TrainingSequence], shared: Sequence[int]) -> Bin:
    tree = build_tree([one.ids for one in chains], [0, *shared[1:]])
    trained = [np.flatnonzero(one.mask) for one in chains]
    targets_N = np.concatenate([nodes[at] for nodes, at in zip(tree.nodes, trained, strict=True)])
    sources_N = np.concatenate([nodes[at - 1] for nodes, at in zip(tree.nodes, trained, strict=True)])
    nodes_M, first_M, predictions_N = np.unique(targets_N, return_index=True, return_inverse=True)
    return Bin(
        tree.ids[None],
        tree.positions[None],
        tree.segments,
        sources_N[first_M],
        tree.ids[nodes_M],
        predictions_N,
        *_token_fields(chains, trained),
    )


def _padded_bin(chains: Sequence[TrainingSequence], _shared: Sequence[int]) -> Bin:
    length = max(len(one.ids) for one in chains)
    ids = np.zeros((len(chains), length), dtype=np.int64)
    for row, one in enumerate(chains):
        ids[row, : len(one.ids)] = one.ids
    trained = [np.flatnonzero(one.mask) for one in chains]
    places = np.concatenate([row * length + at for row, at in enumerate(trained)])
    targets = ids.reshape(-1)[places]
    return Bin(ids, None, None, places - 1, targets, np.arange(len(places)), *_token_fields(chains, trained))


def _token_fields(
    chains: Sequence[TrainingSequence], trained: Sequence[npt.NDArray[np.int64]]
) -> tuple[
    npt.NDArray[np.float32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int32],
    float,
    int,
]:
    """Return the fields of Bin from `behaviour` on, per trained token in order of (chain, position)."""
    behaviour = np.concatenate([one.behaviour[at] for one, at in zip(chains, trained, strict=True)])
    rollout_ids = np.repeat(np.array([one.rollout_id for one in chains], dtype=np.int64), [len(at) for at in trained])
    turn_ids = np.concatenate([one.turn_ids[at] for one, at in zip(chains, trained, strict=True)])
    unknown = np.int32(-1)
    steps = [
        np.full(len(at), unknown) if one.policy_steps is None else one.policy_steps[at]
        for one, at in zip(chains, trained, strict=True)
    ]
    return (
        behaviour,
        rollout_ids,
        turn_ids,
        np.concatenate(list(trained)),
        np.concatenate(steps),
        chains[0].temperature,
        sum(len(one.ids) for one in chains),
    )
