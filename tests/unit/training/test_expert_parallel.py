"""Experts that are divided among ranks: gradients, clipping, files and checkpoints of one rank."""

from pathlib import Path

import pytest

from tests.unit.training.cuts import make_config
from tests.unit.training.divided_work import LORA, Alone, Layouts, make_case, run_alone, run_divided
from tests.unit.training.test_gradients import arguments_of, make_architecture
from training import model_files
from training.expert_parallel import EXPERT_PARALLEL_ARCHITECTURES, why_no_expert_parallel
from training.learner import RankLearner

pytestmark = pytest.mark.usefixtures("single_rank")
NAMES = sorted(EXPERT_PARALLEL_ARCHITECTURES, key=len)
LAYOUTS: Layouts = {
    2: [
        ("Qwen3-MoE", {"expert_parallel": 2}),
        ("Qwen3-MoE", {"expert_parallel": 2}),  # again
        ("Qwen3.5-MoE", {"expert_parallel": 2}),
        ("Qwen3.5-MoE", {}),  # what two ranks differ from one without divided experts
        ("adapters", {"expert_parallel": 2}),
    ],
    4: [
        ("Qwen3-MoE", {"expert_parallel": 2, "shard_ranks": 2}),
        ("Qwen3.5-MoE", {"expert_parallel": 2, "activation_checkpointing": True}),
    ],
}


@pytest.fixture(scope="module")
def alone(single_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training of one rank, from its own checkpoint of a step before: Qwen3.5-MoE with recorded experts."""
    directory = tmp_path_factory.mktemp("alone")
    cases = {
        "Qwen3-MoE": make_case(make_architecture(NAMES[0], directory, **arguments_of(NAMES[0])), directory / "3"),
        "Qwen3.5-MoE": make_case(
            make_architecture(NAMES[1], directory, **arguments_of(NAMES[1])), directory / "35", True
        ),
        "adapters": make_case(directory / NAMES[0], directory / "lora", **LORA),
    }
    return run_alone(cases)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_divided_experts_train_as_one_rank_does(world_size: int, alone: Alone, tmp_path: Path) -> None:
    """Each rank holds its share of the experts' weights and moments."""
    for name, case, ranks in run_divided(LAYOUTS, world_size, alone, tmp_path):
        expected = alone[name][1]
        share = case.config.training.shard_ranks or world_size
        for rank in ranks:
            assert rank.expert_weights * share == expected.expert_weights > 0
            assert rank.expert_moments * share == expected.expert_moments


def test_what_cannot_be_divided_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"training.expert_parallel: Qwen3ForCausalLM has no experts; use another number, or leave it out",
    ):
        RankLearner(model, make_config(expert_parallel=2))
    mixtral = make_architecture("MixtralForCausalLM", tmp_path, num_local_experts=4)
    with pytest.raises(ValueError, match="expert_parallel: MixtralForCausalLM is not registered"):
        RankLearner(mixtral, make_config(expert_parallel=2))
    path = make_architecture(NAMES[0], tmp_path, **arguments_of(NAMES[0]))
    with pytest.raises(ValueError, match="expert_parallel: 3 does not divide the number of experts, 4"):
        RankLearner(path, make_config(expert_parallel=3))
    with pytest.raises(
        ValueError, match="expert_parallel: 2 does not divide the ranks that hold a copy of the weights, 1"
    ):
        RankLearner(path, make_config(expert_parallel=2))
    loaded = model_files.load_causal_lm(path, "auto")
    assert why_no_expert_parallel(loaded, 2, 4) is None
    reason = why_no_expert_parallel(loaded, 2, 6)
    assert reason == "3 ranks would hold the same experts, which cannot shard 32 and 32 rows evenly"
