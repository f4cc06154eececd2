"""The groups of a tree's blocks: every pair of a token and its ancestor once, in few kernel calls."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.forests import forest
from training.attention_blocks import OWN_CALL_FROM_PAIRS, BlockGroup, group_blocks

CPU = torch.device("cpu")


def pairs_of(group: BlockGroup) -> list[tuple[int, int]]:
    queries = torch.arange(1 << 14)[group.queries].tolist()
    keys = torch.arange(1 << 14)[group.keys].tolist()
    found = []
    for some_queries, some_keys in group.blocks():
        for at, query in enumerate(queries[some_queries]):
            mine = keys[some_keys]
            found += [(query, key) for key in (mine[: at + 1] if group.causal else mine)]
    return found


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_every_pair_is_in_one_block(shape: list[tuple[int, int]]) -> None:
    segments = forest(shape)
    groups = group_blocks(segments, CPU)
    found = [pair for group in groups for pair in pairs_of(group)]
    expected = {
        (query, key) for one in segments for key in range(one.start, one.end) for query in range(key, one.subtree_end)
    }
    assert len(found) == len(set(found)) and set(found) == expected


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_the_number_of_calls_is_that_of_the_depths(shape: list[tuple[int, int]]) -> None:
    segments = forest(shape)
    depths: list[int] = []
    for one in segments:
        depths.append(0 if one.parent < 0 else depths[one.parent] + 1)
    forked = {depth for depth, one in zip(depths, segments, strict=True) if one.subtree_end > one.end}
    groups = group_blocks(segments, CPU)
    assert len(groups) == 1 + len(forked)
    assert groups[0].causal and not any(group.causal for group in groups[1:])


def test_offsets_and_longest_blocks_are_those_of_the_kernels() -> None:
    own, below = group_blocks(forest([(4, 0), (3, 1), (2, 1), (5, 0), (1, 1)]), CPU)
    assert own.flash_sizes[0].tolist() == [0, 4, 7, 9, 14, 15] and own.flash_sizes[2:] == (5, 5)
    assert own.queries == slice(0, 15) == own.keys
    assert below.flash_sizes[0].tolist() == [0, 5, 6] and below.flash_sizes[1].tolist() == [0, 4, 9]
    assert below.flash_sizes[2:] == (5, 5)
    assert isinstance(below.queries, torch.Tensor) and below.queries.tolist() == [4, 5, 6, 7, 8, 14]
    assert below.flash_sizes[0].dtype == torch.int32, "flash attention reads 32 bits each"


def test_a_large_block_has_own_call() -> None:
    """16,000 tokens of a chain are; 4,000 of it are not, but 4,000 with 14,000 below them are."""
    long, forked = forest([(16_000, 0), (50, 0)]), forest([(4_000, 0), (14_000, 1)])
    for segments, expected in ((long, [True, False]), (forked, [True, False, True])):
        assert [group.has_own_call for group in group_blocks(segments, CPU, OWN_CALL_FROM_PAIRS)] == expected
        assert not any(group.has_own_call for group in group_blocks(segments, CPU))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_blocks_that_are_alone_change_no_pair(shape: list[tuple[int, int]], alone_from: int) -> None:
    segments = forest(shape)
    together, apart = ([pair for group in groups for pair in pairs_of(group)] for groups in (
        group_blocks(segments, CPU), group_blocks(segments, CPU, alone_from)
    ))  # fmt: skip
    assert sorted(together) == sorted(apart)
