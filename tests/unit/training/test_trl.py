"""The same batch through TRL's GRPO loss and through ours: equal loss, equal gradients.

Recorded logprobs are TRL's old ones, and its own correction for the sampling engine is off.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.config import RunConfig
from tests.unit.training.cuts import Turns
from training.plan_builder import reducer_weights
from training.plan_types import Member, Plan, TrainingSequence

pytestmark = [pytest.mark.usefixtures("single_rank"), pytest.mark.filterwarnings("ignore")]

LIMIT = 40


def make_batch(seed: int, reducer: str) -> tuple[Plan, list[TrainingSequence]]:
    """Make two groups of four with one prompt each, some with a tool result in the middle.

    Ratios lie on both sides of every bound.
    """
    random = np.random.default_rng(seed)
    rollouts = []
    for number in range(8):
        prompt = np.random.default_rng(100 + number // 4).integers(0, 300, 12)
        ids = np.concatenate([prompt, random.integers(0, 300, 14 + int(random.integers(0, 9)))]).astype(np.int32)
        spans = [(12, len(ids))] if number % 2 else [(12, 17), (20, len(ids))]
        behaviour = (-5.7 + 0.5 * random.standard_normal(len(ids))).astype(np.float32)
        rollouts.append(Turns(number, ids, behaviour, spans))
    group_of = {one.rollout_id: one.rollout_id // 4 for one in rollouts}
    weights = reducer_weights(reducer, {one.rollout_id: one.num_tokens for one in rollouts}, group_of, LIMIT)
    advantages = random.standard_normal(8)
    members = [
        Member(n, n // 4, None, 0.0, float(advantages[n]), rollouts[n].num_tokens, 0, weights[n]) for n in range(8)
    ]
    return Plan(1, members, 0, {"updates_per_step": 1}, 0), [chain for one in rollouts for chain in one.chains([False])]


@pytest.mark.parametrize(
    ("preset", "knobs", "options"),
    [
        ("dapo", {"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("grpo", {}, {"loss_type": "grpo"}),
        ("dr_grpo", {"constant_tokens": LIMIT}, {"loss_type": "dr_grpo", "max_completion_length": LIMIT}),
        ("cispo", {"ratio_cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        (
            "gspo",
            {"clip_low": 0.1, "clip_high": 0.1},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
        ),
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_loss_and_gradients_agree(
    preset: str, knobs: dict[str, Any], options: dict[str, Any], micro_batch: int, model: Path, tmp_path: Path
) -> None:
    from tests.benchmarks._trl import TrlStep
    from training.learner import RankLearner

    config = RunConfig.model_validate(
        {
            "datasets": [{"path": "unused.jsonl"}],
            "sampling": {"max_response_tokens": 32, "max_context_tokens": 64},
            "loss": {"preset": preset, **knobs},
            "training": {"bin_tokens": 512},
        }
    )
    plan, chains = make_batch(1, config.loss.reducer)
    if preset == "gspo":  # TRL's sequence is the whole completion, ours the turn: equal if a rollout has one turn
        chains = [
            TrainingSequence(c.rollout_id, c.ids, c.mask, c.behaviour, np.full_like(c.turn_ids, c.rollout_id), 1.0)
            for c in chains
        ]
    members = {member.rollout_id: member for member in plan.members}
    theirs = TrlStep(model, tmp_path, micro_batch, 8, **options)
    their_loss = theirs.gradients(theirs.batch(chains, members))
    learner = RankLearner(model, config)
    our_loss = learner.accumulate(chains, members).loss
    ours = np.concatenate([parameter.grad.full_tensor().flatten().numpy() for parameter in learner.policy.parameters()])
    expected = theirs.gradient().numpy()
    assert our_loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert np.abs(expected).max() > 1e-3
    assert np.abs(ours - expected).max() <= 3e-6 * max(1.0, float(np.abs(expected).max()))
