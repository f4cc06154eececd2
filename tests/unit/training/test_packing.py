"""Bins hold every trained token once, within the budget; a tree holds every chain, and no shared prefix twice."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.routed_experts import RoutedExperts
from training.attention_blocks import group_blocks
from training.packing import Packing, PassCost, _cut_equally, _num_depths, deal_bins, pack_bin, spare_chain
from training.plan_types import TrainingSequence
from training.prefix_tree import build_tree, depth_first, shared_tokens

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
"""Chains of few different tokens: prefixes of every length are shared, and chains are equal or prefixes of another."""


def sequence(rollout: int, ids: list[int], temperature: float = 1.0) -> TrainingSequence:
    random = np.random.default_rng(rollout * 1000 + len(ids))
    mask = random.random(len(ids)) < 0.4
    mask[0], mask[-1] = False, len(ids) > 1
    behaviour = np.where(mask, -random.random(len(ids)), 0).astype(np.float32)
    turns = rollout * 100 + np.arange(len(ids)) // 3
    return TrainingSequence(rollout, np.array(ids, dtype=np.int32), mask, behaviour, turns, temperature)


def prefixes(chains: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(chain[: end + 1]) for chain in chains for end in range(len(chain))}


@given(st.lists(IDS, min_size=1, max_size=10))
@settings(deadline=None)
def test_a_tree_is_its_chains_and_every_prefix_once(drawn: list[list[int]]) -> None:
    chains = [np.array(ids, dtype=np.int32) for ids in drawn]
    chains = [chains[number] for number in depth_first(chains)]
    shared = [0, *(shared_tokens(one, other) for one, other in itertools.pairwise(chains))]
    tree = build_tree(chains, shared)
    assert len(tree.ids) == len(prefixes(drawn)), "the tree is minimal"
    for chain, nodes in zip(chains, tree.nodes, strict=True):
        assert (tree.ids[nodes] == chain).all() and (tree.positions[nodes] == np.arange(len(chain))).all()
    assert [segment.start for segment in tree.segments] == [0, *(segment.end for segment in tree.segments[:-1])]
    for number, segment in enumerate(tree.segments):
        assert segment.start < segment.end <= segment.subtree_end
        below = [n for n, other in enumerate(tree.segments) if segment.end <= other.start < segment.subtree_end]
        assert len([n for n in below if tree.segments[n].parent == number]) != 1, "nothing forks there"
        assert all(
            _is_above(tree.segments, number, other) == (other in below)
            for other in range(number + 1, len(tree.segments))
        )


def _is_above(segments: list, above: int, below: int) -> bool:  # type: ignore[type-arg]
    while below >= 0 and below != above:
        below = segments[below].parent
    return below == above


@given(
    st.lists(st.tuples(IDS.filter(lambda ids: len(ids) > 1), st.sampled_from([1.0, 0.7])), min_size=1, max_size=16),
    st.integers(12, 60),
    st.integers(1, 4),
    st.sampled_from(["auto", "tree", "packed", "padded"]),
    st.floats(0, 0.1),
    st.sampled_from([(), (40.0, 8.0)]),
)
@settings(deadline=None)
def test_every_trained_token_once_within_the_budget(
    drawn: list[tuple[list[int], float]],
    bin_tokens: int,
    num_ranks: int,
    packing: Packing,
    pair_cost: float,
    launches: tuple[float, ...],
) -> None:
    sequences = [sequence(rollout, ids, temperature) for rollout, (ids, temperature) in enumerate(drawn)]
    chosen, dealt = deal_bins(sequences, num_ranks, bin_tokens, packing, PassCost(pair_cost, *launches))
    assert len(dealt) == num_ranks and len(dealt[0]) - 1 <= min(map(len, dealt)), "at most one pass less than rank 0"
    seen = []
    for share in dealt:
        for bin in (pack_bin(chains, chosen) for chains in share):
            assert bin.ids.size <= bin_tokens
            assert (bin.ids.reshape(-1)[bin.sources + 1] == bin.targets).all() or chosen == "tree"
            targets = bin.targets[bin.predictions]
            facts = zip(
                bin.rollout_ids.tolist(), bin.turn_ids.tolist(), targets.tolist(), bin.behaviour.tolist(), strict=True
            )
            seen += [(*fact, bin.temperature) for fact in facts]
    expected = [
        (one.rollout_id, int(one.turn_ids[t]), int(one.ids[t]), float(one.behaviour[t]), one.temperature)
        for one in sequences
        for t in np.flatnonzero(one.mask)
    ]
    assert sorted(seen) == sorted(expected)


def test_shared_prefixes_are_computed_once_across_rollouts_and_tasks() -> None:
    """Three tasks with one system prompt, each sampled twice, in a bin that holds all."""
    system = list(range(50))
    chains = [
        sequence(2 * task + n, [*system, *[100 + task] * 10, *[200 + n] * 5]) for task in range(3) for n in range(2)
    ]
    ((together,),) = deal_bins(chains, 1, 1000, "tree", PassCost(0.0)).bins
    bin = pack_bin(together, "tree")
    assert bin.ids.size == 50 + 3 * 10 + 6 * 5
    assert bin.num_chain_tokens == 6 * 65
    assert len({segment.parent for segment in bin.segments or []}) == 1 + 1 + 3


def test_a_tree_larger_than_a_bin_is_split_by_its_leaves() -> None:
    chains = [sequence(n, [*range(50), *[100 + n] * 10]) for n in range(6)]
    bins = [pack_bin(part, "tree") for part in deal_bins(chains, 1, 80, "tree", PassCost(0.0)).bins[0]]
    assert [bin.ids.size for bin in bins] == [80, 80], "three leaves each; the path above them is computed again"


def test_ranks_get_equal_work_by_flops_and_not_by_tokens() -> None:
    chains = [sequence(0, list(range(400))), *(sequence(n, [n] * 40) for n in range(1, 30))]
    by_tokens = deal_bins(chains, 2, 10_000, "packed", PassCost(0.0)).bins
    by_flops = deal_bins(chains, 2, 10_000, "packed", PassCost(0.05)).bins
    tokens = [[sum(len(one.ids) for one in bin) for bin in share] for share in by_tokens]
    assert tokens == [pytest.approx([780], abs=40)] * 2
    (with_long,) = (bin for share in by_flops for bin in share if any(len(one.ids) == 400 for one in bin))
    assert sum(len(one.ids) for one in with_long) < 560


def test_one_rank_computes_no_prefix_twice_to_make_bins_equal() -> None:
    """With one rank the sum counts: 1,100 + 300 tokens in two bins, not 950 twice."""
    chains = [sequence(0, [0] * 100), sequence(11, [9] * 300)]
    chains += [sequence(n, [*[1] * 500, *[n + 1] * 50]) for n in range(1, 11)]
    (bins,) = deal_bins(chains, 1, 1100, "tree", PassCost(0.0)).bins
    assert sum(pack_bin(bin, "tree").ids.size for bin in bins) == 1400


def test_a_chain_longer_than_a_bin_is_named() -> None:
    with pytest.raises(ValueError, match=r"rollout 7 has 41 tokens, more than training.bin_tokens \(40\)"):
        deal_bins([sequence(7, list(range(41)))], 1, 40, "tree", PassCost(0.0))


@pytest.mark.parametrize("packing", ["tree", "padded"])
def test_a_spare_pass_costs_two_tokens(packing: Packing) -> None:
    bin = pack_bin([spare_chain(sequence(7, list(range(41))))], packing)
    assert bin.ids.size == 2 and len(bin.targets) == len(bin.behaviour) == 1


def agents(num_groups: int, prefix: int, suffix: int) -> list[TrainingSequence]:
    """Groups of eight chains with a prefix of their own."""
    return [
        sequence(8 * group + n, [*[group] * prefix, *[1000 + 8 * group + n] * suffix])
        for group in range(num_groups)
        for n in range(8)
    ]


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        (agents(1, 1536, 512), "packed"),  # fewer tokens, and neither pass waits for the device
        (agents(8, 1536, 512), "tree"),  # three passes in place of eight
        (agents(8, 614, 1434), "packed"),  # seven passes in place of eight, and each has launches more
        (agents(1, 0, 2048), "tree"),  # nothing is shared, and a tree without forks is packed chains
    ],
)
def test_chains_are_packed_if_launches_last_longer_than_shared_tokens(
    chains: list[TrainingSequence], expected: str
) -> None:
    """As on an H100 at 0.6B in bins of 16k: 0.30 s of launches in a pass without forks, 0.05 s more with one depth, and
    0.24 s of kernels for a full bin."""
    assert deal_bins(chains, 1, 16_384, "auto", PassCost(1.9e-4, 24_500, 4_000)).packing == expected
    assert deal_bins(chains, 1, 16_384, "auto", PassCost(1.9e-4, 10, 2)).packing == "tree", "launches that are fast"
    assert deal_bins(chains, 1, 16_384, "auto", PassCost(1.9e-4)).packing == "tree", "nothing is launched"


@given(st.lists(IDS, min_size=1, max_size=10))
@settings(deadline=None)
def test_launches_are_counted_of_the_depths_at_which_a_tree_forks(drawn: list[list[int]]) -> None:
    chains = [sequence(number, ids) for number, ids in enumerate(drawn)]
    (cut,) = _cut_equally(chains, 1, 1000, "tree", PassCost(0.0))
    groups = group_blocks(pack_bin(cut.chains, "tree").segments or [], torch.device("cpu"))
    assert _num_depths(cut.forks) == len(groups) - 1


def _efficiency(num_ranks: int, chains_per_rank: int, bin_tokens: int, seed: int) -> float:
    """Return the share of the ranks' time that is work, if a pass lasts as long as its heaviest bin.

    The chains are as long as agents' chains: lognormal around 8,000 tokens, at most 65,536. A pair costs what it costs
    in a dense model of four billion parameters.
    """
    pair_cost = 7.4e-5
    random = np.random.default_rng(seed)
    lengths = np.exp(np.log(8000) + random.standard_normal(num_ranks * chains_per_rank)).clip(64, 65_536).astype(int)
    nothing = np.zeros(65_536, dtype=np.bool_), np.zeros(65_536, np.float32), np.zeros(65_536, np.int64)
    chains = [
        TrainingSequence(n, np.full(length, n, np.int32), *(part[:length] for part in nothing), 1.0)
        for n, length in enumerate(lengths)
    ]
    dealt = deal_bins(chains, num_ranks, bin_tokens, "packed", PassCost(pair_cost)).bins
    work = np.zeros((num_ranks, len(dealt[0])))
    for rank, share in enumerate(dealt):
        for number, bin in enumerate(share):
            work[rank, number] = sum(len(one.ids) * (1 + pair_cost * len(one.ids) / 2) for one in bin)
    return float(work.sum() / (num_ranks * work.max(0).sum()))


@pytest.mark.parametrize(("num_ranks", "chains_per_rank"), [(8, 32), (64, 32)])
def test_ranks_wait_little_for_each_other(num_ranks: int, chains_per_rank: int) -> None:
    """In contiguous shares of equal work, 64 ranks computed for 41 to 56% of the time: their passes were not equal."""
    assert min(_efficiency(num_ranks, chains_per_rank, 65_536, seed) for seed in range(3)) >= 0.85


@given(
    st.lists(st.tuples(IDS, st.integers(0, 12), st.booleans()), min_size=1, max_size=10),
    st.sampled_from(["tree", "packed", "padded"]),
)
@settings(deadline=None)
def test_every_token_keeps_the_experts_that_were_recorded(
    drawn: list[tuple[list[int], int, bool]], packing: Packing
) -> None:
    """Of each chain only the first tokens were recorded, or none; the experts follow from the tokens up to here."""

    def experts_of(prefix: list[int]) -> list[list[int]]:
        return [[hash(tuple(prefix)) % 251, len(prefix)], [prefix[-1], 7]]

    chains, recorded = [], set()
    for number, (ids, num_known, is_asked) in enumerate(drawn):
        whole = np.array([experts_of(ids[: end + 1]) for end in range(len(ids))], np.uint8)
        found = RoutedExperts.unknown(len(ids), whole)
        found.fill(0, whole[:num_known])
        chains.append(replace(sequence(number, ids), experts=found if is_asked else None))
        recorded |= {tuple(ids[: end + 1]) for end in range(min(num_known, len(ids)))} if is_asked else set()
    ((together,),) = deal_bins(chains, 1, 1000, packing, PassCost(0.0)).bins
    bin = pack_bin(together, packing)
    if not recorded:
        assert bin.experts is None
        return
    assert bin.experts is not None and len(bin.experts.ids) == len(bin.experts.known) == bin.ids.size
    shared = [0] * len(together)
    if packing == "tree":
        shared = [0, *(shared_tokens(one.ids, other.ids) for one, other in itertools.pairwise(together))]
    places = [row * bin.ids.shape[1] + np.arange(len(one.ids)) for row, one in enumerate(together)]
    if packing != "padded":
        places = build_tree([one.ids for one in together], shared).nodes
    for one, at in zip(together, places, strict=True):
        for end, place in enumerate(at.tolist()):
            prefix = one.ids[: end + 1].tolist()
            if bin.experts.known[place]:
                assert bin.experts.ids[place].tolist() == experts_of(prefix)
            elif packing == "tree":
                assert tuple(prefix) not in recorded
            else:
                assert one.experts is None or not one.experts.known[end]
    if packing == "tree":
        assert bin.experts.known.sum() == len(recorded)
