"""Pack chains into bins: which rank computes a chain, which chains share a forward pass, and which tokens are trained.

No gradient depends on the packing. numpy only.

    chains -> depth-first order -> bins within the token budget, about equal in work -> dealt to ranks, heaviest first

tree    equal prefixes are computed once per bin, also across tasks, rollouts and chains; a tree larger than a bin is
        split by its leaves, and the path above them is computed again
packed  chains side by side, nothing shared, nothing padded
auto    the one of these two whose passes last shorter on the device (`PassCost`)
padded  chains as rows of one rectangle, for architectures without segment attention
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ratchet.routed_experts import RoutedExperts
from training.plan_types import TrainingSequence
from training.prefix_tree import Segment, build_tree, depth_first, shared_tokens

Packing = Literal["auto", "tree", "packed", "padded"]

_SAME_WORK = 1.01
"""Precision of the heaviest bin's work, as a factor."""


@dataclass(slots=True, frozen=True)
class Bin:
    """One forward pass over `ids` (B, T).

    In a forest B is 1, and `segments` and `positions` (1, T) define which tokens attend to which. In a padded bin
    both are None, and every row is one chain, padded on the right with 0.

    M predicted tokens: `targets` (M,) are predicted at `sources` (M,), flat indices into `ids`. N trained tokens, one
    per (chain, position): trained token n reads prediction `predictions[n]` and was sampled with logprob
    `behaviour[n]` in turn `turn_ids[n]` of rollout `rollout_ids[n]` by the weights of `policy_steps[n]` (-1 if
    unknown); in its chain it stands at `chain_positions[n]`. N > M if rollouts share sampled tokens.
    `num_chain_tokens`: tokens of the chains, each counted in full. `experts`: recorded ones of the B x T tokens, None
    if there are none; a token that several chains share has those of the last chain in which they were recorded.
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
    experts: RoutedExperts | None = None

    @property
    def num_pairs(self) -> int:
        """Return the (query, key) pairs of one attention layer; a causal block counts in full, as in model FLOPs."""
        if self.segments is None:
            return int(self.ids.shape[0] * self.ids.shape[1] ** 2)
        return sum((one.end - one.start) * (one.subtree_end - one.start) for one in self.segments)


class PassCost(NamedTuple):
    """Costs of a forward and backward pass, in units of one token's linear layers.

    `pair`: of one (query, key) pair on the device. `launches`: of the kernel launches of a pass on the host, in which
    nothing forks. `depth`: of those for each depth of a tree at which it forks (`training/attention_blocks.py`). The
    host launches kernels ahead of the device, so a pass lasts as long as the slower of the two. A CPU, on which a
    launch is a call, has 0 of both.
    """

    pair: float
    launches: float = 0.0
    depth: float = 0.0


class Dealt(NamedTuple):
    """`bins`: per rank and pass, the chains of one bin, which is packed as `packing` says."""

    packing: Packing
    bins: list[list[list[TrainingSequence]]]


def deal_bins(
    sequences: Sequence[TrainingSequence], num_ranks: int, bin_tokens: int, packing: Packing, cost: PassCost
) -> Dealt:
    """Deal bins of at most `bin_tokens` tokens with padding. Deterministic.

    Ranks compute their passes in step, so a pass lasts as long as its heaviest bin. Bins are therefore dealt by their
    work, the heaviest first, and the bins of one pass are about equal. A rank may have one pass less than others.
    `auto` is a tree, unless packed chains last shorter. Raises ValueError for a chain that is longer than a bin; no
    chain is truncated.
    """
    for one in sequences:
        if len(one.ids) > bin_tokens:
            raise ValueError(
                f"a chain of rollout {one.rollout_id} has {len(one.ids)} tokens, more than training.bin_tokens "
                f"({bin_tokens})"
            )
    both: tuple[Packing, ...] = ("tree", "packed") if cost.launches else ("tree",)
    ways = both if packing == "auto" else (packing,)
    cuts = {way: _cut_equally(sequences, num_ranks, bin_tokens, way, cost) for way in ways}
    fastest = min(cuts, key=lambda way: _duration(cuts[way], num_ranks, cost))
    bins = sorted(cuts[fastest], key=lambda one: -one.work)
    return Dealt(fastest, [[one.chains for one in bins[rank::num_ranks]] for rank in range(num_ranks)])


def _cut_equally(
    sequences: Sequence[TrainingSequence], num_ranks: int, bin_tokens: int, packing: Packing, cost: PassCost
) -> list[_Cut]:
    """Cut into as few passes as `bin_tokens` allows, in which the ranks have about equal work."""
    ordered = _ordered(sequences, packing)
    cut = partial(_cut, ordered, _shared(ordered, packing), bin_tokens, packing, cost.pair)
    bins = cut(math.inf)
    num_bins = math.ceil(len(bins) / num_ranks) * num_ranks
    low, high = 0.0, sum(one.work for one in bins) if num_ranks > 1 else 0.0  # one rank waits for no other
    while high > low * _SAME_WORK and high - low > 1:
        # The smallest bound of a bin's work that needs no further pass makes bins of about equal work.
        middle = (low + high) / 2
        found = cut(middle)
        if len(found) <= num_bins:
            # Smaller bins compute shared prefixes more often, so they are taken only if the passes become shorter.
            bins = min(bins, found, key=partial(_duration, num_ranks=num_ranks, cost=cost))
            high = middle
        else:
            low = middle
    return bins


def _duration(bins: Sequence[_Cut], num_ranks: int, cost: PassCost) -> float:
    """Return how long the passes last: each as long as its heaviest bin, on the device or on the host."""
    each = [max(one.work, cost.launches + cost.depth * _num_depths(one.forks) if cost.launches else 0) for one in bins]
    return sum(sorted(each, reverse=True)[::num_ranks])


def _num_depths(forks: Sequence[int]) -> int:
    """Return at how many depths a tree forks; `forks`: where its chains leave the one before, in depth-first order."""
    path = [[0, 0]]  # forks above the last chain, from the root on, and at how many depths the tree forks below each
    for fork in (*forks, 0):
        below = 0
        while path[-1][0] > fork:
            below = max(below, path.pop()[1]) + 1
        if path[-1][0] < fork:
            path.append([fork, 0])
        path[-1][1] = max(path[-1][1], below)
    return path[0][1]


def spare_chain(chain: TrainingSequence) -> TrainingSequence:
    """Return a chain of two tokens for the pass of a rank that has no bin left; its loss must be multiplied by 0."""
    return replace(TrainingSequence.of_ids(chain.ids[:2].tolist()), rollout_id=chain.rollout_id)


@dataclass(slots=True)
class _Cut:
    """The chains of one bin, `forks` at which they leave the one before (0 for the root), and what they cost."""

    chains: list[TrainingSequence]
    forks: list[int]
    tokens: int
    longest: int
    work: float


def _ordered(sequences: Sequence[TrainingSequence], packing: Packing) -> list[TrainingSequence]:
    """Sort by temperature, then depth-first, or longest first if rows are padded."""
    if packing == "padded":
        return sorted(sequences, key=lambda one: (one.temperature, -len(one.ids)))
    in_tree = [sequences[number] for number in depth_first([one.ids for one in sequences])]
    return sorted(in_tree, key=lambda one: one.temperature)


def _shared(ordered: Sequence[TrainingSequence], packing: Packing) -> list[int]:
    """Return, per chain, how many of its tokens are computed with the chain before it."""
    if packing in ("packed", "padded"):
        return [0] * len(ordered)
    pairs = itertools.pairwise(ordered)
    later = [shared_tokens(one.ids, other.ids) if one.temperature == other.temperature else 0 for one, other in pairs]
    return [0, *later][: len(ordered)]


def _work(num_tokens: int, num_shared: int, pair_cost: float) -> float:
    """Return the work of the tokens after the first `num_shared`: linear layers, and causal pairs."""
    new = num_tokens - num_shared
    return new + pair_cost * new * (num_tokens + num_shared + 1) / 2


def _cut(
    ordered: Sequence[TrainingSequence],
    shared: Sequence[int],
    bin_tokens: int,
    packing: Packing,
    pair_cost: float,
    limit: float,
) -> list[_Cut]:
    """Cut into as few runs of neighbours as `bin_tokens` and the work `limit` allow; a heavier chain is alone."""
    bins: list[_Cut] = []
    for one, num_shared in zip(ordered, shared, strict=True):
        length = len(one.ids)
        last = bins[-1] if bins and bins[-1].chains[-1].temperature == one.temperature else None
        if last is not None:
            longest, work = max(last.longest, length), last.work + _work(length, num_shared, pair_cost)
            tokens = last.tokens + length - num_shared
            if packing == "padded":
                rows = len(last.chains) + 1
                tokens, work = rows * longest, rows * _work(longest, 0, pair_cost)
            if tokens <= bin_tokens and work <= limit:
                if num_shared < len(last.chains[-1].ids):  # else it goes on where that chain ends
                    last.forks.append(num_shared)
                last.chains.append(one)
                bins[-1] = _Cut(last.chains, last.forks, tokens, longest, work)
                continue
        bins.append(_Cut([one], [], length, length, _work(length, 0, pair_cost)))
    return bins


def pack_bin(chains: Sequence[TrainingSequence], packing: Packing) -> Bin:
    return _padded_bin(chains) if packing == "padded" else _forest_bin(chains, _shared(chains, packing))


def _forest_bin(chains: Sequence[TrainingSequence], shared: Sequence[int]) -> Bin:
    tree = build_tree([one.ids for one in chains], shared)
    trained = [np.flatnonzero(one.mask) for one in chains]
    targets_N = np.concatenate([nodes[at] for nodes, at in zip(tree.nodes, trained, strict=True)])
    sources_N = np.concatenate([nodes[at - 1] for nodes, at in zip(tree.nodes, trained, strict=True)])
    nodes_M, first_M, predictions_N = np.unique(targets_N, return_index=True, return_inverse=True)
    return _bin(
        chains,
        trained,
        ids=tree.ids[None],
        positions=tree.positions[None],
        segments=tree.segments,
        sources=sources_N[first_M],
        targets=tree.ids[nodes_M],
        predictions=predictions_N,
        experts=_experts(chains, tree.nodes, len(tree.ids)),
    )


def _padded_bin(chains: Sequence[TrainingSequence]) -> Bin:
    length = max(len(one.ids) for one in chains)
    ids = np.zeros((len(chains), length), dtype=np.int64)
    for row, one in enumerate(chains):
        ids[row, : len(one.ids)] = one.ids
    trained = [np.flatnonzero(one.mask) for one in chains]
    places = np.concatenate([row * length + at for row, at in enumerate(trained)])
    rows = [row * length + np.arange(len(one.ids)) for row, one in enumerate(chains)]
    return _bin(
        chains,
        trained,
        ids=ids,
        positions=None,
        segments=None,
        sources=places - 1,
        targets=ids.reshape(-1)[places],
        predictions=np.arange(len(places)),
        experts=_experts(chains, rows, ids.size),
    )


def _experts(
    chains: Sequence[TrainingSequence], places: Sequence[npt.NDArray[np.int64]], num_tokens: int
) -> RoutedExperts | None:
    """Return the experts of a bin's tokens. `places`: per chain, the flat indices of its tokens in the bin."""
    recorded = [
        (one.experts, at) for one, at in zip(chains, places, strict=True) if one.experts and one.experts.known.any()
    ]
    if not recorded:
        return None
    found = RoutedExperts.unknown(num_tokens, recorded[0][0].ids)
    for experts, at in recorded:
        found.ids[at[experts.known]] = experts.ids[experts.known]
        found.known[at[experts.known]] = True
    return found


def _bin(chains: Sequence[TrainingSequence], trained: Sequence[npt.NDArray[np.int64]], **layout: Any) -> Bin:
    """Return the bin of a layout. `trained`: per chain, the positions of its trained tokens."""
    known = list(zip(chains, trained, strict=True))
    steps = [np.full(len(at), np.int32(-1)) if one.policy_steps is None else one.policy_steps[at] for one, at in known]
    return Bin(
        behaviour=np.concatenate([one.behaviour[at] for one, at in known]),
        rollout_ids=np.concatenate([np.full(len(at), one.rollout_id, dtype=np.int64) for one, at in known]),
        turn_ids=np.concatenate([one.turn_ids[at] for one, at in known]),
        chain_positions=np.concatenate(trained),
        policy_steps=np.concatenate(steps),
        temperature=chains[0].temperature,
        num_chain_tokens=sum(len(one.ids) for one in chains),
        **layout,
    )
