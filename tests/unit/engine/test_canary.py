"""Scores of an engine that pass the canary."""

import math
from pathlib import Path

import numpy as np
import pytest

from engine import canary
from engine.canary import canary_row, judge_canary
from tests.unit.training.cuts import make_config, make_plan, make_rollouts

IDS = list(range(40))


def around(centre: np.ndarray, noise: float, seed: int = 0) -> np.ndarray:
    return (centre + noise * np.random.default_rng(seed).standard_normal(len(centre))).astype(np.float32)


OLD = around(np.full(39, -3.0), 1.0, seed=1)


@pytest.mark.parametrize("moved", [1e-6, 1e-3, 0.03, 0.5])
@pytest.mark.parametrize("noise", [0.0003, 0.01])
def test_an_engine_that_took_the_update_passes_however_small_it_was(moved: float, noise: float) -> None:
    new = around(OLD, moved, seed=2)
    verdict = judge_canary(around(new, noise, seed=3), canary_row(IDS, new), canary_row(IDS, OLD))
    assert verdict.reason is None
    assert verdict.mean_gap == pytest.approx(noise * math.sqrt(2 / math.pi), rel=0.5)


@pytest.mark.parametrize("moved", [0.005, 0.03, 0.5])
def test_an_update_that_silently_did_nothing_is_found(moved: float) -> None:
    new = around(OLD, moved, seed=2)
    reason = judge_canary(around(OLD, 0.0003, seed=3), canary_row(IDS, new), canary_row(IDS, OLD)).reason
    assert reason is not None and ("still serves" in reason or "differ" in reason)


@pytest.mark.parametrize("answer", [OLD + 0.3, np.full(39, np.nan, dtype=np.float32)])
def test_other_weights_are_found_without_the_version_before(answer: np.ndarray) -> None:
    assert judge_canary(answer, canary_row(IDS, OLD), None).reason is not None


@pytest.mark.usefixtures("single_rank")
def test_the_learners_canary_equals_the_scores_of_its_published_files(model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from training.learner import RankLearner

    rollouts = make_rollouts(6)
    learner = RankLearner(model, make_config())
    before = learner.canary()
    learner.step(make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True])])
    learner.publish(tmp_path / "1.e1")
    row = learner.canary()
    ids = torch.tensor([row["ids"]])
    assert row["ids"] == before["ids"] == canary.canary_ids(tmp_path / "1.e1")[:63], (
        "with the token that is asked for, all of the context"
    )
    with torch.no_grad():
        published = (
            AutoModelForCausalLM.from_pretrained(tmp_path / "1.e1", dtype=torch.float32)(ids)
            .logits[0, :-1]
            .log_softmax(-1)
        )
    answer = published.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    assert judge_canary(answer, row, before).reason is None
    assert judge_canary(np.array(before["logprobs"], dtype=np.float32), row, before).reason is not None
