"""A setting that the learner's model does not allow is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from stack.learner_models import LearnerModels
from tests.unit.training.test_gradients import MOE, make_architecture


def test_experts_that_cannot_be_replayed_or_divided_are_refused(model: Path, tmp_path: Path) -> None:
    def require(**values: Any) -> None:
        training = {"router_replay": True}
        datasets = [{"path": "x"}]
        LearnerModels(
            RunConfig.model_validate({"datasets": datasets, "training": training} | values)
        ).require_trainable()

    require(model=str(make_architecture("Qwen3MoeForCausalLM", tmp_path, **MOE)))
    require(training={})
    for name, reason in (
        ("tiny", "the tiny policy has no experts; "),
        (str(model), "Qwen3ForCausalLM has no experts; "),
        (str(tmp_path / "none"), "has no config.json"),
    ):
        with pytest.raises(ConfigError, match=reason):
            require(model=name)
        with pytest.raises(ConfigError, match=reason):
            require(model=name, training={"expert_parallel": 2})
    experts = str(tmp_path / "Qwen3MoeForCausalLM")
    require(model=experts, training={"expert_parallel": 2, "workers": 2})
    with pytest.raises(ConfigError, match="expert_parallel: 2 does not divide the ranks that hold a copy of the we"):
        require(model=experts, training={"expert_parallel": 2, "workers": 3})
    with pytest.raises(ConfigError, match="expert_parallel: 3 does not divide the number of experts, 4; use another"):
        require(model=experts, training={"expert_parallel": 3})


def test_chains_too_long_for_a_models_positions_are_refused(model: Path, tmp_path: Path) -> None:
    """Of a policy and of a reference, before any engine starts. The learner names a model that cannot be read."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 48}
    dynamic = str(make_architecture("LlamaForCausalLM", tmp_path, rope_parameters=rope))

    def require(tokens: int, **values: Any) -> None:
        sampling = {"max_context_tokens": tokens, "max_response_tokens": 16}
        config = RunConfig.model_validate({"datasets": [{"path": "x"}], "sampling": sampling} | values)
        LearnerModels(config).require_trainable()

    require(48, model=dynamic)
    require(64, model=dynamic, training={"steps": 0})
    require(64, model=str(tmp_path / "none"))
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    require(64, model=str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match=r"wrong cannot be trained here: .*hidden_size"):
        require(64, model=str(tmp_path / "wrong"), training={"router_replay": True})
    loss = {"reference_kl": 0.1, "reference_model": dynamic}
    for values in ({"model": dynamic}, {"model": str(model), "loss": loss}):
        with pytest.raises(
            ConfigError,
            match=r"learner cannot use .*Llama.*\(dynamic\) depend on the longest chain .* set sampling.max",
        ):
            require(64, **values)


def test_bins_that_cannot_be_shared_are_refused(model: Path) -> None:
    def require(**training: Any) -> None:
        values = {"model": str(model), "datasets": [{"path": "x"}], "training": training}
        LearnerModels(RunConfig.model_validate(values)).require_trainable()

    require(sequence_parallel=2, workers=4)
    with pytest.raises(ConfigError, match="sequence_parallel: 2 does not divide the number of ranks, 3"):
        require(sequence_parallel=2, workers=3)
    with pytest.raises(ConfigError, match="sequence_parallel: 3 does not divide the attention heads of Qwen3ForCausal"):
        require(sequence_parallel=3, workers=3)
    with pytest.raises(ConfigError, match=r"sequence_parallel: training.packing: padded has whole rows; use another"):
        require(sequence_parallel=2, workers=2, packing="padded")
