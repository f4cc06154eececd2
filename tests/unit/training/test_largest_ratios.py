"""The tokens with the largest ratios are those that the model itself gives, for any packing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ratchet.token_statistics import TrainedToken
from tests.unit.training.cuts import largest_ratios, make_config, make_plan, make_relatives
from training.plan_types import TrainingSequence
from training.token_statistics import NUM_KEPT

pytestmark = pytest.mark.usefixtures("single_rank")


def every_token(model: Path, sequences: list[TrainingSequence]) -> list[TrainedToken]:
    """Return every trained token, computed chain by chain with the plain model, the largest ratio first."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for one in sequences:
        ids = torch.from_numpy(one.ids.astype(np.int64))
        with torch.no_grad():
            scores = plain(ids[None]).logits[0, :-1].log_softmax(-1)
        entropies = -(scores.exp() * scores).sum(-1)
        for at in np.flatnonzero(one.mask).tolist():
            logprob = float(scores[at - 1, ids[at]])
            known = (one.rollout_id, int(one.turn_ids[at]), at, int(ids[at]), float(one.behaviour[at]), logprob)
            found.append(TrainedToken(*known, float(entropies[at - 1]), masked=False))
    return sorted(found, key=lambda token: -abs(token.logprob - token.behaviour))


@pytest.mark.parametrize(("packing", "bin_tokens"), [("tree", 80), ("tree", 4096), ("packed", 4096), ("padded", 80)])
def test_any_packing_finds_them(model: Path, packing: str, bin_tokens: int) -> None:
    family = make_relatives(7)
    chains = [chain for one in family for chain in one.chains([True, False])]
    for number, chain in enumerate(chains):  # no two distances are close, so that rounding cannot change the order
        chain.behaviour[chain.mask] += np.linspace(0, 1 + number, int(chain.mask.sum()), dtype=np.float32)
    config = make_config(bin_tokens, preset="dapo", packing=packing)
    found = largest_ratios(model, config, make_plan(family, "token_mean"), chains)
    wanted = every_token(model, chains)
    assert len(wanted) > NUM_KEPT == len(found)
    for one, other in zip(found, wanted, strict=False):
        assert (one.rollout_id, one.turn_id, one.position, one.token_id) == (
            other.rollout_id,
            other.turn_id,
            other.position,
            other.token_id,
        )
        assert (one.behaviour, one.logprob, one.entropy) == pytest.approx(
            (other.behaviour, other.logprob, other.entropy), abs=1e-4
        )
    assert any(one.masked for one in found), "ratios beyond the clip get no gradient"


def test_a_step_with_fewer_tokens_has_them_all(model: Path) -> None:
    family = make_relatives(3, count=1)
    chains = family[0].chains([False])
    found = largest_ratios(model, make_config(4096), make_plan(family, "token_mean"), chains)
    assert {one.position for one in found} == set(np.flatnonzero(chains[0].mask).tolist())
