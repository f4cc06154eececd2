"""Entropy and log-ratio of every trained token are those that the model itself gives, for any packing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ratchet.token_statistics import TrainedTurn
from tests.unit.training.cuts import make_config, make_plan, make_relatives, trained_turns
from training.plan_types import TrainingSequence

pytestmark = pytest.mark.usefixtures("single_rank")

Seen = dict[tuple[int, int, int], tuple[float, float]]
"""(rollout, turn, chain position) → entropy and log-ratio."""


def computed(model: Path, sequences: list[TrainingSequence]) -> Seen:
    """Compute every trained token chain by chain, with the plain model's own logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for one in sequences:
        ids = torch.from_numpy(one.ids.astype(np.int64))
        with torch.no_grad():
            logits = plain(ids[None]).logits[0, :-1] / one.temperature
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        for at in np.flatnonzero(one.mask).tolist():
            log_ratio = float(logits[at - 1].log_softmax(-1)[ids[at]]) - float(one.behaviour[at])
            found[one.rollout_id, int(one.turn_ids[at]), at] = (float(entropies[at - 1]), log_ratio)
    return found


def recorded(turns: list[TrainedTurn]) -> Seen:
    assert all(one.entropies.dtype == one.log_ratios.dtype == np.float16 for one in turns)
    assert len({one.turn_id for one in turns}) == len(turns), "one record per turn"
    return {
        (one.rollout_id, one.turn_id, one.start + at): (float(one.entropies[at]), float(one.log_ratios[at]))
        for one in turns
        for at in np.flatnonzero(~np.isnan(one.entropies)).tolist()
    }


@pytest.mark.parametrize(
    ("packing", "bin_tokens", "temperature"),
    [("tree", 80, 1.0), ("tree", 4096, 0.7), ("packed", 4096, 1.0), ("padded", 80, 1.0)],
)
def test_any_packing_records_them(model: Path, packing: str, bin_tokens: int, temperature: float) -> None:
    family = make_relatives(7)
    chains = [replace(chain, temperature=temperature) for one in family for chain in one.chains([True, False])]
    config = make_config(bin_tokens, preset="dapo", packing=packing)
    found = recorded(trained_turns(model, config, make_plan(family, "token_mean"), chains))
    wanted = computed(model, chains)
    assert found.keys() == wanted.keys() and len(wanted) == sum(one.num_tokens for one in family)
    for token, (entropy, log_ratio) in wanted.items():
        assert found[token] == pytest.approx((entropy, log_ratio), rel=2e-3, abs=1e-4), token  # float16


def test_a_token_between_trained_ones_that_is_not_trained_is_nan(model: Path) -> None:
    family = make_relatives(3, count=1)
    (chain,) = family[0].chains([False])
    start, end = next(span for span in family[0].spans if span[1] - span[0] > 2)
    chain.mask[start + 1] = False
    turns = trained_turns(model, make_config(4096), make_plan(family, "token_mean"), [chain])
    (turn,) = [one for one in turns if one.start == start]
    assert (
        np.flatnonzero(np.isnan(turn.entropies)).tolist() == [1] == np.flatnonzero(np.isnan(turn.log_ratios)).tolist()
    )
    assert len(turn.entropies) == end - start
    assert recorded(turns).keys() == computed(model, [chain]).keys()
