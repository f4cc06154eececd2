"""Work of one learner alone, and of several ranks that divide its weights or its bins."""

import multiprocessing
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from ratchet.config import RunConfig
from ratchet.token_statistics import TrainedTurn
from ratchet.types import JsonObject
from tests.unit.training.cuts import make_config, make_plan, make_relatives
from tests.unit.training.test_router_replay import with_experts
from training.learner import RankLearner, clip_gradients
from training.plan_types import Plan, TrainingSequence

LORA = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}


@dataclass(frozen=True)
class Case:
    """The model, settings and sequences of a learner. `checkpoint`: that of a learner with another number of ranks."""

    model: Path
    config: RunConfig
    plan: Plan
    sequences: Sequence[TrainingSequence]
    directory: Path
    checkpoint: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Gradients by parameter, the norm before clipping and after it, files before a step and after it.

    `expert_weights` and `expert_moments`: of experts, on this rank. `layer_tokens`: computed by its first layer in one
    pass over the bins. `canary`: before the step, empty without a tokenizer. `metrics` and `trained_turns` are those of
    the step, on rank 0 only.
    """

    gradients: dict[str, npt.NDArray[np.float32]]
    norms: tuple[float, float]
    initial_files: dict[str, str]
    trained_files: dict[str, str]
    expert_weights: int
    expert_moments: int
    layer_tokens: int
    canary: JsonObject
    metrics: dict[str, float]
    trained_turns: Sequence[TrainedTurn]


def publish(learner: RankLearner, directory: Path) -> dict[str, str]:
    """Return the digests of the files with tensors; others name the directory of an adapter's base."""
    return {file["name"]: file["sha256"] for file in learner.publish(directory) if "safetensors" in file["name"]}


def run(case: Case) -> Outcome:
    """Use all that a learner does with weights and bins that are divided. A collective."""
    learner = RankLearner(case.model, case.config)
    if case.checkpoint is not None:
        learner.load(case.checkpoint)
    initial_files = publish(learner, case.directory / "initial")
    canary = learner.canary() if (case.model / "tokenizer.json").is_file() else {}
    learner.policy.train()
    tokens: list[int] = []
    layer: Any = learner.policy.model.get_decoder().layers[0].input_layernorm
    counting = layer.register_forward_hook(lambda _module, _inputs, hidden: tokens.append(hidden.shape[:-1].numel()))
    learner.accumulate(case.sequences, {member.rollout_id: member for member in case.plan.members})
    counting.remove()
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
        sum(tokens),
        canary,
        result.metrics,
        result.trained_turns,
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
    forks = multiprocessing.get_context("forkserver")
    directory.mkdir()
    request, answer = directory / "request", directory / "answer"
    request.write_bytes(pickle.dumps(cases))
    ranks = [
        forks.Process(target=run_rank, args=(directory / "meeting", number, world_size, request, answer))
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


def make_case(model: Path, directory: Path, recorded: bool = False, preset: str = "cispo", **training: object) -> Case:
    """Without recorded experts two ranks have two bins each; with them three bins, so that one of four has none."""
    family = make_relatives(5, 10)
    chains = [chain for one in family for chain in one.chains([True, False])]
    if recorded:
        chains = with_experts(chains[:6], 3)
    config = make_config(64, preset=preset, router_replay=recorded, **training)
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
    assert found.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-5)


def weights_of(directory: Path) -> npt.NDArray[np.float32]:
    """Return all published weights, flat."""
    tensors = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return np.concatenate([tensor.flatten() for one in tensors for _, tensor in sorted(one.items())])


Alone = dict[str, tuple[Case, Outcome]]
"""By name, what one rank trains, and its outcome."""
Layouts = dict[int, list[tuple[str, dict[str, Any]]]]
"""World size -> names of what is trained, and how it is divided."""


def run_alone(cases: dict[str, Case]) -> Alone:
    """Train each case on one rank, from its own checkpoint of a step before."""
    found = {}
    for name, case in cases.items():
        before = run(replace(case, directory=case.directory / "before"))
        case = replace(case, checkpoint=str(case.directory / "before" / "checkpoint"))
        found[name] = case, run(case)
        assert found[name][1].initial_files == before.trained_files
    return found


def run_divided(
    layouts: Layouts, world_size: int, alone: Alone, directory: Path
) -> list[tuple[str, Case, list[Outcome]]]:
    """Return name, case and each rank's outcome of the layouts, after comparing with what one rank trains.

    From one rank's checkpoint: equal files before the step, gradients, norms and weights; one rank goes on from
    theirs. Of two ranks the first layout is the second one, too: a replayed step has the same bits.
    """
    names = [name for name, _ in layouts[world_size]]
    cases = [
        divided(alone[name][0], directory / str(number), training)
        for number, (name, training) in enumerate(layouts[world_size])
    ]
    outcomes = run_ranks(directory / "ranks", world_size, cases)
    if world_size == 2:
        assert layouts[2][0] == layouts[2][1]
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
        assert publish(learner, directory / f"loaded{number}") == found.trained_files
    return [
        (name, case, [rank[number] for rank in outcomes])
        for number, (name, case) in enumerate(zip(names, cases, strict=True))
    ]
