"""Experts that are divided among ranks: gradients, clipping, files and checkpoints of one rank."""

import multiprocessing
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from ratchet.config import RunConfig
from tests.unit.training.cuts import make_config, make_plan, make_relatives
from tests.unit.training.test_gradients import arguments_of, make_architecture
from tests.unit.training.test_router_replay import with_experts
from training import model_files
from training.expert_parallel import EXPERT_PARALLEL_ARCHITECTURES, why_no_expert_parallel
from training.learner import RankLearner, clip_gradients
from training.plan_types import Plan, TrainingSequence

pytestmark = pytest.mark.usefixtures("single_rank")
NAMES = sorted(EXPERT_PARALLEL_ARCHITECTURES, key=len)
_forks = multiprocessing.get_context("forkserver")


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
    initial_files: dict[str, str]
    trained_files: dict[str, str]
    expert_weights: int
    expert_moments: int
    grad_norm: float


def publish(learner: RankLearner, directory: Path) -> dict[str, str]:
    """Return the digests of the files with tensors; others name the directory of an adapter's base."""
    return {file["name"]: file["sha256"] for file in learner.publish(directory) if "safetensors" in file["name"]}


def run(case: Case) -> Outcome:
    """Use all that a learner does with experts. A collective."""
    learner = RankLearner(case.model, case.config)
    if case.checkpoint is not None:
        learner.load(case.checkpoint)
    initial_files = publish(learner, case.directory / "initial")
    learner.policy.train()
    learner.accumulate(case.sequences, {member.rollout_id: member for member in case.plan.members})
    gradients = {
        name: one.grad.full_tensor().clone().numpy()  # type: ignore[union-attr]
        for name, one in learner.policy.named_parameters()
        if one.requires_grad
    }
    norm, clipped = (clip_gradients(learner.trained, most, learner.num_copies) for most in (0.01, 1e9))
    learner.optimiser.zero_grad()
    result = learner.step(case.plan, case.sequences)
    trained_files = publish(learner, case.directory / "trained")
    learner.save_async(str(case.directory / "checkpoint")).result()
    experts = [one for name, one in learner.policy.named_parameters() if ".experts." in name]
    moments = [
        one
        for expert in experts
        for name, one in learner.optimiser.state.get(expert, {}).items()
        if name.startswith("exp_avg")
    ]
    return Outcome(
        gradients,
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
    found = [run(case) for case in pickle.loads(request.read_bytes())]
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
    deadline = time.monotonic() + 400
    for process in ranks:
        process.join(deadline - time.monotonic())
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size
    return [pickle.loads(answer.with_suffix(f".{number}").read_bytes()) for number in range(world_size)]


def make_case(model: Path, directory: Path, recorded: bool = False, **training: object) -> Case:
    """Without recorded experts two ranks have two bins each; with them three bins, so that one of four has none."""
    family = make_relatives(5, 10)
    chains = [chain for one in family for chain in one.chains([True, False])]
    if recorded:
        chains = with_experts(chains[:6], 3)
    config = make_config(64, preset="cispo", router_replay=recorded, **training)
    return Case(model, config, make_plan(family, "token_mean"), chains, directory)


def divided(case: Case, directory: Path, training: dict[str, object]) -> Case:
    """Return the case with these keys of `training`."""
    config = case.config.model_copy(update={"training": case.config.training.model_copy(update=training)})
    return replace(case, config=config, directory=directory)


def assert_same_gradient(found: Outcome, alone: Outcome) -> None:
    """Every parameter's gradient is that of one rank."""
    assert found.gradients.keys() == alone.gradients.keys()
    errors = {name: np.linalg.norm(found.gradients[name] - one) for name, one in alone.gradients.items()}
    lengths = {name: np.linalg.norm(one) for name, one in alone.gradients.items()}
    whole = np.linalg.norm(list(lengths.values()))
    assert np.linalg.norm(list(errors.values())) < 1e-5 * whole
    relative = {name: error / lengths[name] for name, error in errors.items() if lengths[name] > 0}
    worst = sorted(relative, key=lambda name: -relative[name])[:2]
    print(
        f"whole {np.linalg.norm(list(errors.values())) / whole:.1e}, worst {[(n, f'{relative[n]:.1e}') for n in worst]}"
    )
    for name, length in lengths.items():
        # The gradients of A_log and dt_bias in Gated DeltaNet, four numbers each, are sums that nearly cancel out.
        assert length > 0 and errors[name] < 1e-4 * length + 1e-7 * whole, name
    assert found.norms == pytest.approx(alone.norms, rel=1e-5)
    assert found.norms[1] == pytest.approx(0.01, rel=1e-3)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


def weights_of(directory: Path) -> npt.NDArray[np.float32]:
    """Return all published weights, flat."""
    tensors = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return np.concatenate([tensor.flatten() for one in tensors for _, tensor in sorted(one.items())])


LORA = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}
LAYOUTS = {  # world size -> (what is trained, as below, and how it is divided)
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
def alone(single_rank: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Outcome]]:
    """What one rank trains, from its own checkpoint of a step before: Qwen3.5-MoE with recorded experts."""
    directory = tmp_path_factory.mktemp("alone")
    cases = {
        "Qwen3-MoE": make_case(make_architecture(NAMES[0], directory, **arguments_of(NAMES[0])), directory / "3"),
        "Qwen3.5-MoE": make_case(
            make_architecture(NAMES[1], directory, **arguments_of(NAMES[1])), directory / "35", True
        ),
        "adapters": make_case(directory / NAMES[0], directory / "lora", **LORA),
    }
    found = {}
    for name, case in cases.items():
        before = run(replace(case, directory=case.directory / "before"))
        case = replace(case, checkpoint=str(case.directory / "before" / "checkpoint"))
        found[name] = case, run(case)
        assert found[name][1].initial_files == before.trained_files
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_ranks_with_divided_experts_train_as_one_rank_does(
    world_size: int, alone: dict[str, tuple[Case, Outcome]], tmp_path: Path
) -> None:
    """From the checkpoint of one rank: equal files before the step, gradients, norms and weights; one rank goes on from
    theirs. Each rank holds its share of the experts' weights and moments.
    """
    names = [name for name, _ in LAYOUTS[world_size]]
    cases = [
        divided(alone[name][0], tmp_path / str(number), training)
        for number, (name, training) in enumerate(LAYOUTS[world_size])
    ]
    outcomes = run_ranks(tmp_path / "ranks", world_size, cases)
    if world_size == 2:
        assert outcomes[0][0].trained_files == outcomes[0][1].trained_files, "a replayed step has the same bits"
    for number, (name, case) in enumerate(zip(names, cases, strict=True)):
        one_case, expected = alone[name]
        found = outcomes[0][number]
        assert found.initial_files == expected.initial_files
        assert_same_gradient(found, expected)
        before, old = (weights_of(one_case.directory / when) for when in ("initial", "trained"))
        new = weights_of(case.directory / "trained")
        assert np.linalg.norm(new - old) < 1e-2 * np.linalg.norm(old - before)
        learner = RankLearner(one_case.model, one_case.config)
        learner.load(str(case.directory / "checkpoint"))
        assert publish(learner, tmp_path / f"loaded{number}") == found.trained_files
        share = case.config.training.shard_ranks or world_size
        for rank in outcomes:
            assert rank[number].expert_weights * share == expected.expert_weights > 0
            assert rank[number].expert_moments * share == expected.expert_moments


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
