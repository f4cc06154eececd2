"""Ranks that share bins train as one rank does: gradients, metrics, recorded tokens, files and checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.token_statistics import TrainedTurn
from stack.learner_models import LearnerModels
from tests.standins.tiny_model import make_tokenizer
from tests.unit.training.cuts import make_config
from tests.unit.training.divided_work import LORA, Alone, Layouts, make_case, run_alone, run_divided
from tests.unit.training.test_gradients import arguments_of, make_architecture
from training import model_files
from training.learner import RankLearner
from training.packing import PassCost, deal_bins
from training.plan_types import TrainingSequence
from training.sequence_parallel import Joining, SequenceRanks, why_no_sequence_parallel

pytestmark = pytest.mark.usefixtures("single_rank")
DENSE, EXPERTS, DELTA = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM"
LAYOUTS: Layouts = {
    2: [
        ("Qwen3", {"sequence_parallel": 2}),
        ("Qwen3", {"sequence_parallel": 2}),  # again
        ("Qwen3.5-MoE", {"sequence_parallel": 2}),
        ("adapters", {"sequence_parallel": 2}),
    ],
    4: [
        ("Qwen3", {"sequence_parallel": 4}),  # more ranks than key heads
        ("short", {"sequence_parallel": 4}),
        ("Qwen3-MoE", {"sequence_parallel": 2, "expert_parallel": 2}),
        ("Qwen3.5-MoE", {"sequence_parallel": 2, "shard_ranks": 2, "activation_checkpointing": True}),
    ],
}
BY_BIN = {"computed_tokens", "peak_memory_gib", "tflop", "tree_token_ratio"}
"""Metrics that depend on which chains share a bin."""


def beginning(chain: TrainingSequence) -> TrainingSequence:
    """Return the first three tokens, of which the last one is trained."""
    mask = np.array([False, False, True])
    behaviour = np.where(mask, np.float32(-6.0), np.float32(0.0))
    return TrainingSequence(chain.rollout_id, chain.ids[:3], mask, behaviour, chain.turn_ids[:3], 0.7)


@pytest.fixture(scope="module")
def alone(single_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training of one rank: Qwen3 with ratios of whole turns, a reference, a teacher and a bonus of entropy; the
    same with chains of three tokens; Qwen3.5-MoE with recorded experts."""
    directory = tmp_path_factory.mktemp("alone")
    paths = {name: make_architecture(name, directory, **arguments_of(name)) for name in (EXPERTS, DELTA)}
    paths[DENSE] = make_architecture(DENSE, directory, vocab_size=512)
    make_tokenizer(paths[DENSE], vocab_size=400)
    dense = make_case(paths[DENSE], directory / "dense", preset="gspo")
    terms = {"reference_kl": 0.1, "teacher_model": str(paths[DENSE]), "distillation": 0.1, "entropy_bonus": 0.01}
    loss = dense.config.loss.model_copy(update=terms)
    dense = replace(dense, config=dense.config.model_copy(update={"loss": loss}))
    beginnings = [beginning(one) for one in dense.sequences]
    cases = {
        "Qwen3": dense,
        "short": replace(dense, directory=directory / "short", sequences=beginnings),
        "Qwen3-MoE": make_case(paths[EXPERTS], directory / "3"),
        "Qwen3.5-MoE": make_case(paths[DELTA], directory / "35", recorded=True),
        "adapters": make_case(paths[DENSE], directory / "lora", **LORA),
    }
    return run_alone(cases)


def assert_same_turns(found: Sequence[TrainedTurn], expected: Sequence[TrainedTurn]) -> None:
    """Every turn is recorded once, with the values of one rank, which are stored as float16."""
    pairs = zip(*(sorted(turns, key=lambda one: (one.turn_id, one.start)) for turns in (found, expected)), strict=True)
    for one, other in pairs:
        assert (one.turn_id, one.start) == (other.turn_id, other.start)
        assert np.allclose(one.entropies, other.entropies, rtol=2e-3, atol=1e-3, equal_nan=True)
        assert np.allclose(one.log_ratios, other.log_ratios, rtol=2e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_ranks_that_share_bins_train_as_one_rank_does(world_size: int, alone: Alone, tmp_path: Path) -> None:
    """Every token is counted and recorded once."""
    for name, case, ranks in run_divided(LAYOUTS, world_size, alone, tmp_path):
        expected, found = alone[name][1], ranks[0]
        assert found.canary.get("ids") == expected.canary.get("ids")
        assert found.canary.get("logprobs") == pytest.approx(expected.canary.get("logprobs"), abs=2e-6)
        for metric in expected.metrics.keys() - BY_BIN:
            assert found.metrics[metric] == pytest.approx(expected.metrics[metric], rel=1e-4, abs=1e-6), metric
        assert_same_turns(found.trained_turns, expected.trained_turns)
        if case.config.training.sequence_parallel == world_size:
            shared = [rank.layer_tokens for rank in ranks]
            assert shared == [shared[0]] * world_size, "the same number of tokens on every rank"
            num_bins = len(deal_bins(case.sequences, 1, 64, "tree", PassCost(0.0)).bins[0])
            assert 0 <= sum(shared) - expected.layer_tokens < num_bins * world_size, "last slices are filled up"


def test_what_cannot_be_divided_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training.sequence_parallel: 2 does not divide the number of ranks, 1; use"):
        RankLearner(model, make_config(sequence_parallel=2))
    with pytest.raises(ValueError, match="sequence_parallel: padded bins have no segments; use another number, or"):
        RankLearner(model, make_config(sequence_parallel=2, packing="padded"))
    loaded = {
        name: model_files.load_causal_lm(make_architecture(name, tmp_path, **arguments_of(name)), "auto")
        for name in (DENSE, DELTA)
    }
    assert [why_no_sequence_parallel(loaded[DENSE], size) for size in (1, 2, 4)] == [None] * 3
    reason = why_no_sequence_parallel(loaded[DENSE], 3)
    assert reason == "3 does not divide the attention heads of Qwen3ForCausalLM, 4"
    reason = why_no_sequence_parallel(loaded[DELTA], 4)
    assert reason == "4 does not divide linear_num_key_heads of Qwen3_5MoeForCausalLM, 2"
    loaded[DENSE].config.num_attention_heads = 12
    loaded[DENSE].config.num_key_value_heads = 6
    reason = why_no_sequence_parallel(loaded[DENSE], 4)
    assert reason == "4 neither divides the key and value heads of Qwen3ForCausalLM, 6, nor is a multiple of them"


def test_the_teacher_of_shared_bins_is_named_if_its_heads_do_not_allow_it(model: Path, tmp_path: Path) -> None:
    odd = make_architecture(DENSE, tmp_path, num_attention_heads=3, num_key_value_heads=3)
    values = {"model": str(model), "datasets": [{"path": "x"}], "training": {"sequence_parallel": 2, "workers": 2}}
    loss = {"teacher_model": str(odd), "distillation": 0.1}
    with pytest.raises(ConfigError, match=r"parallel: 2 does not divide the attention heads of Qwen3.*, 3; use"):
        LearnerModels(RunConfig.model_validate(values | {"loss": loss})).require_trainable()


def test_values_without_a_gradient_stay_without_one(single_rank: None) -> None:
    """A gradient of zeros would take the slower backward of the output layer."""
    assert dist.group.WORLD is not None
    joining = Joining(SequenceRanks(dist.group.WORLD, 0, 1), [3], torch.tensor([2, 0, 1]))
    logprobs, entropies = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    found, _ = joining.join(logprobs * 1, entropies * 1)
    assert found.tolist() == [2.0, 0.0, 1.0]
    torch.autograd.backward((found * torch.tensor([1.0, 10.0, 100.0])).sum())
    assert logprobs.grad is not None and logprobs.grad.tolist() == [10.0, 100.0, 1.0]
    assert entropies.grad is None
