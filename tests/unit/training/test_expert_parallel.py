"""Experts that are divided among ranks: gradients, clipping, files and checkpoints of one rank."""

import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from ratchet.config import RunConfig
from ratchet.types import JsonObject
from tests.unit.training.cuts import make_config, make_plan, make_relatives
from tests.unit.training.test_gradients import arguments_of, make_architecture
from tests.unit.training.test_router_replay import with_experts
from training.expert_parallel import EXPERT_PARALLEL_ARCHITECTURES
from training.learner import RankLearner, clip_gradients
from training.plan_types import Plan, TrainingSequence

pytestmark = pytest.mark.usefixtures("single_rank")
NAMES = sorted(EXPERT_PARALLEL_ARCHITECTURES)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.unit.training.test_expert_parallel"])


@dataclass(frozen=True)
class Case:
    """What a learner is made of and what it trains. `checkpoint`: of a learner of another number of ranks."""

    model: Path
    config: RunConfig
    plan: Plan
    sequences: Sequence[TrainingSequence]
    directory: Path
    checkpoint: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Gradients by parameter, the norm before clipping and after it, files before a step and after it, and the number
    of weights and moments of experts that this rank holds.
    """

    gradients: dict[str, npt.NDArray[np.float32]]
    norms: tuple[float, float]
    initial_files: list[JsonObject]
    trained_files: list[JsonObject]
    expert_weights: int
    expert_moments: int
    grad_norm: float


def run(case: Case, is_first: bool) -> Outcome:
    """Use all that a learner does with experts. A collective."""
    learner = RankLearner(case.model, case.config)
    if case.checkpoint is not None:
        learner.load(case.checkpoint)
    initial_files = learner.publish(case.directory / "initial")
    learner.policy.train()
    learner.accumulate(case.sequences, {member.rollout_id: member for member in case.plan.members})
    gradients = {
        name: one.grad.full_tensor().clone().numpy()  # type: ignore[union-attr]
        for name, one in learner.policy.named_parameters()
        if one.requires_grad
    }
    norm = clip_gradients(learner.trained, 0.01)
    clipped = clip_gradients(learner.trained, 1e9)
    learner.optimiser.zero_grad()
    result = learner.step(case.plan, case.sequences)
    trained_files = learner.publish(case.directory / "trained")
    learner.save_async(str(case.directory / "checkpoint")).result()
    experts = [one for name, one in learner.policy.named_parameters() if ".experts." in name]
    moments = [learner.optimiser.state[one][key] for one in experts for key in ("exp_avg", "exp_avg_sq")]
    return Outcome(
        gradients if is_first else {},
        (norm, clipped),
        initial_files,
        trained_files,
        sum(one.to_local().numel() for one in experts),  # type: ignore[attr-defined]
        sum(one.to_local().numel() for one in moments),
        result.metrics["grad_norm"],
    )


def run_rank(meeting: Path, number: int, world_size: int, request: Path, answer: Path) -> None:
    """Run one rank's process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world_size)
    found = [run(case, number == 0) for case in pickle.loads(request.read_bytes())]
    answer.with_suffix(f".{number}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(directory: Path, world_size: int, cases: Sequence[Case]) -> list[list[Outcome]]:
    """Return the outcomes of each rank."""
    directory.mkdir()
    request, answer = directory / "request", directory / "answer"
    request.write_bytes(pickle.dumps(cases))
    ranks = [
        _forks.Process(target=run_rank, args=(directory / "meeting", number, world_size, request, answer))
        for number in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(150)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size
    return [pickle.loads(answer.with_suffix(f".{number}").read_bytes()) for number in range(world_size)]


def make_case(
    model: Path, directory: Path, recorded: bool = False, checkpoint: str | None = None, **training: object
) -> Case:
    """Many small bins, so that ranks have different ones; some rank has none in the last pass."""
    family = make_relatives(5)
    chains = [chain for one in family for chain in one.chains([True, False])]
    if recorded:
        chains = with_experts(chains, 3 if "Qwen3_5" in model.name else 2)
    config = make_config(80, preset="cispo", router_replay=recorded, **training)
    return Case(model, config, make_plan(family, "token_mean"), chains, directory, checkpoint)


def assert_same_gradient(found: Outcome, alone: Outcome) -> None:
    """Every parameter's gradient is that of one rank."""
    assert found.gradients.keys() == alone.gradients.keys()
    errors = {name: np.linalg.norm(found.gradients[name] - one) for name, one in alone.gradients.items()}
    lengths = {name: np.linalg.norm(one) for name, one in alone.gradients.items()}
    whole = np.linalg.norm(list(lengths.values()))
    assert np.linalg.norm(list(errors.values())) < 1e-5 * whole
    for name, length in lengths.items():
        # In Gated DeltaNet the gradient of four numbers is 2e-5 of the whole: sums that nearly cancel out.
        assert length > 0 and errors[name] < 1e-4 * length + 1e-7 * whole, name
    assert found.norms == pytest.approx(alone.norms, rel=1e-5)
    assert found.norms[1] == pytest.approx(0.01, rel=1e-3)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


def weights_of(path: Path, files: Sequence[JsonObject]) -> npt.NDArray[np.float32]:
    """Return all published weights, flat."""
    tensors = [load_file(path / file["name"]) for file in files if file["name"].endswith(".safetensors")]
    return np.concatenate([tensor.flatten() for one in tensors for _, tensor in sorted(one.items())])


LAYOUTS = {  # world size -> (architecture, recorded experts, config keys)
    2: [(name, True, {"expert_parallel": 2}) for name in NAMES],
    4: [
        ("Qwen3MoeForCausalLM", False, {"expert_parallel": 4}),
        ("Qwen3MoeForCausalLM", False, {"expert_parallel": 2, "shard_ranks": 2}),
        ("Qwen3_5MoeForCausalLM", True, {"expert_parallel": 2, "activation_checkpointing": True}),
    ],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_ranks_with_divided_experts_train_as_one_rank_does(world_size: int, tmp_path: Path) -> None:
    """From the checkpoint of one rank: equal files before the step, gradients, norms and weights; one rank goes on from
    theirs. Each rank holds its share of the experts' weights and moments.
    """
    cases, alone = [], []
    for number, (name, recorded, training) in enumerate(LAYOUTS[world_size]):
        path = make_architecture(name, tmp_path, **arguments_of(name))
        before = run(make_case(path, tmp_path / f"before{number}", recorded), True)
        checkpoint = str(tmp_path / f"before{number}" / "checkpoint")
        alone.append(run(make_case(path, tmp_path / f"alone{number}", recorded, checkpoint), True))
        assert alone[-1].initial_files == before.trained_files
        cases.append(make_case(path, tmp_path / f"divided{number}", recorded, checkpoint, **training))
    outcomes = run_ranks(tmp_path / "ranks", world_size, cases)
    for number, (case, expected) in enumerate(zip(cases, alone, strict=True)):
        found = outcomes[0][number]
        assert found.initial_files == expected.initial_files
        assert_same_gradient(found, expected)
        new, old = weights_of(case.directory / "trained", found.trained_files), weights_of(
            tmp_path / f"alone{number}" / "trained", expected.trained_files
        )
        moved = old - weights_of(tmp_path / f"alone{number}" / "initial", expected.initial_files)
        assert np.linalg.norm(new - old) < 1e-2 * np.linalg.norm(moved)
        learner = RankLearner(case.model, make_config(80))
        learner.load(str(case.directory / "checkpoint"))
        assert learner.publish(tmp_path / f"loaded{number}") == found.trained_files
        share = case.config.training.shard_ranks or world_size
        for one in (rank[number] for rank in outcomes):
            assert one.expert_weights * share == expected.expert_weights
            assert one.expert_moments * share == 2 * expected.expert_weights


def test_what_cannot_be_divided_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training.expert_parallel: Qwen3ForCausalLM has no experts; leave it out"):
        RankLearner(model, make_config(expert_parallel=2))
    mixtral = make_architecture("MixtralForCausalLM", tmp_path, num_local_experts=4)
    with pytest.raises(ValueError, match="expert_parallel: MixtralForCausalLM is not registered"):
        RankLearner(mixtral, make_config(expert_parallel=2))
    path = make_architecture(NAMES[0], tmp_path, **arguments_of(NAMES[0]))
    with pytest.raises(ValueError, match="expert_parallel: 3 does not divide the number of experts, 4"):
        RankLearner(path, make_config(expert_parallel=3))
    with pytest.raises(ValueError, match="expert_parallel: 2 does not divide the number of ranks, 1"):
        RankLearner(path, make_config(expert_parallel=2))
