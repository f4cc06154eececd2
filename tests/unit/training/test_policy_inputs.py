"""Slices of a bin: together they have each of its tokens and predictions once, in equal shares."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ratchet.routed_experts import RoutedExperts
from tests.unit.training.cuts import make_relatives
from training.packing import Bin, pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import PolicyInputs, make_inputs, slice_length
from training.sequence_parallel import SequenceRanks

CPU = torch.device("cpu")
NO_GROUP = cast("Any", None)
"""A slice is cut without a message to the other ranks."""


def slices(bin: Bin, size: int) -> list[PolicyInputs]:
    return [make_inputs(bin, CPU, SequenceRanks(NO_GROUP, number, size)) for number in range(size)]


def bin_of(seed: int) -> Bin:
    return pack_bin([chain for one in make_relatives(seed, 6) for chain in one.chains([True, False])], "tree")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_slices_have_every_token_and_prediction_once(seed: int, size: int) -> None:
    bin = bin_of(seed)
    parts = slices(bin, size)
    num_tokens, num_own = bin.ids.shape[1], slice_length(bin.ids.shape[1], size)
    assert [part.ids.shape for part in parts] == [(1, num_own)] * size
    assert torch.cat([part.ids for part in parts], 1)[0, :num_tokens].tolist() == bin.ids[0].tolist()
    assert bin.positions is not None and bin.segments is not None
    positions = torch.cat([part.positions for part in parts if part.positions is not None], 1)
    assert positions[0, :num_tokens].tolist() == bin.positions[0].tolist()
    assert all(part.joining is not None and part.segments == parts[0].segments for part in parts)
    assert parts[0].segments is not None and parts[0].segments[: len(bin.segments)] == bin.segments
    assert sum(one.end - one.start for one in parts[0].segments) == num_own * size
    joined = torch.cat([part.sources + number * num_own for number, part in enumerate(parts)])
    targets = torch.cat([part.targets for part in parts])
    for part in parts:
        assert part.joining is not None
        assert list(part.joining.counts) == [len(one.sources) for one in parts]
        assert joined[part.joining.places].tolist() == bin.sources.tolist()
        assert targets[part.joining.places].tolist() == bin.targets.tolist()


def test_a_bin_with_fewer_tokens_than_ranks_leaves_slices_that_predict_nothing() -> None:
    parts = slices(pack_bin([TrainingSequence.of_ids([5, 6, 7], first=2)], "tree"), 8)
    assert [len(part.sources) for part in parts] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert [part.ids.tolist() for part in parts] == [[[5]], [[6]], [[7]], *([[[0]]] * 5)]


def test_experts_go_with_their_tokens_and_are_unknown_behind_the_last_one() -> None:
    bin = bin_of(1)
    num_tokens = bin.ids.shape[1]
    experts = RoutedExperts.unknown(num_tokens, np.zeros((0, 2, 2), np.uint8))
    experts.fill(0, (np.arange(4 * num_tokens) % 250).astype(np.uint8).reshape(num_tokens, 2, 2))
    parts = slices(replace(bin, experts=experts), 3)
    known = torch.cat([part.experts.known for part in parts if part.experts is not None])
    ids = torch.cat([part.experts.ids for part in parts if part.experts is not None])
    assert known.tolist() == [number < num_tokens for number in range(len(known))]
    assert ids[:num_tokens].tolist() == experts.ids.tolist()
