"""Replay of the experts that an engine chose: exact in every packing, and none if they are the router's own."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ratchet.routed_experts import RoutedExperts
from tests.unit.training.cuts import adapter_gradients, gradient, make_config, make_plan, make_relatives
from tests.unit.training.test_gradients import arguments_of, make_architecture
from training.learner import RankLearner
from training.metrics import replay_metrics
from training.packing import Bin, Packing, pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import make_inputs
from training.policy_model import TokenScores
from training.router_replay import REPLAY_ARCHITECTURES, RecordedExperts

pytestmark = pytest.mark.usefixtures("single_rank")
NAMES = sorted(REPLAY_ARCHITECTURES)
NUM_EXPERTS = 4


def score(learner: RankLearner, bin: Bin, experts: RecordedExperts | None) -> tuple[TokenScores, list[Tensor]]:
    """Return logprobs and entropies, and the gradient of both."""
    scores = learner.policy(replace(make_inputs(bin, learner.device), experts=experts), 1.0)
    torch.autograd.backward((scores.logprobs * torch.linspace(-1, 2, len(bin.targets))).sum() + scores.entropies.sum())
    gradient = [parameter.grad.to_local().clone() for parameter in learner.trained if parameter.grad is not None]
    learner.policy.zero_grad(set_to_none=True)
    return TokenScores(*(one.detach() for one in scores)), gradient


@contextmanager
def recording(learner: RankLearner) -> Iterator[list[Tensor]]:
    """Collect the choices of all routers of a forward pass, layer by layer."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
        for _, router in learner.policy.routers
    ]
    yield found
    for hook in hooks:
        hook.remove()


def bin_of(name: str, packing: Packing) -> Bin:
    chains = [chain for one in make_relatives(5) for chain in one.chains([True, False])]
    return pack_bin(sorted(chains, key=lambda one: one.ids.astype(">i4").tobytes()), packing)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packing", ["tree", "packed", "padded"])
@pytest.mark.parametrize("training", [{}, {"dtype": "bfloat16"}, {"activation_checkpointing": True}])
def test_the_routers_own_choice_changes_no_bit(
    name: str, packing: Packing, training: dict[str, object], tmp_path: Path
) -> None:
    path = make_architecture(name, tmp_path, **arguments_of(name))
    learner = RankLearner(path, make_config(4096, packing=packing, router_replay=True, **training))
    learner.policy.train()
    bin = bin_of(name, packing)
    with recording(learner) as choices, torch.no_grad():
        learner.policy(make_inputs(bin, learner.device), 1.0)
    assert len(choices) == learner.policy.model.config.num_hidden_layers
    ids = torch.stack(choices, 1).to(torch.uint8)
    plain, plain_gradient = score(learner, bin, None)
    found, found_gradient = score(learner, bin, RecordedExperts(ids, torch.ones(len(ids), dtype=torch.bool)))
    assert torch.equal(plain.logprobs, found.logprobs) and torch.equal(plain.entropies, found.entropies)
    assert all(torch.equal(one, other) for one, other in zip(plain_gradient, found_gradient, strict=True))
    others = RecordedExperts((ids + 1) % NUM_EXPERTS, torch.ones(len(ids), dtype=torch.bool))
    changed, changed_gradient = score(learner, bin, others)
    assert (changed.logprobs - plain.logprobs).abs().mean() > 0.01
    assert not any(torch.equal(one, other) for one, other in zip(plain_gradient, changed_gradient, strict=True))
    unknown, _ = score(learner, bin, RecordedExperts(others.ids, torch.zeros(len(ids), dtype=torch.bool)))
    assert torch.equal(unknown.logprobs, plain.logprobs)


def with_experts(chains: Sequence[TrainingSequence], num_layers: int) -> list[TrainingSequence]:
    """Give a token experts, or none, that depend on the tokens up to it, so that shared tokens have the same."""

    def choose(prefix: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.uint8], bool]:
        random = np.random.default_rng(zlib.crc32(prefix.tobytes()))
        rows = [random.permutation(NUM_EXPERTS)[:2] for _ in range(num_layers)]
        return np.array(rows, np.uint8), bool(random.random() < 0.8)

    found = []
    for one in chains:
        chosen = [choose(one.ids[: end + 1]) for end in range(len(one.ids))]
        ids, known = (np.array(part) for part in zip(*chosen, strict=True))
        found.append(replace(one, experts=RoutedExperts(ids, known)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_packing_replays_the_same(name: str, tmp_path: Path) -> None:
    arguments = arguments_of(name)
    path = make_architecture(name, tmp_path, **arguments)
    family = make_relatives(5)
    plain = [chain for one in family for chain in one.chains([True, False])]
    chains = with_experts(plain, int(str(arguments.get("num_hidden_layers", 2))))
    plan = make_plan(family, "token_mean")
    alone = gradient(path, make_config(80, packing="padded", preset="cispo", router_replay=True), plan, chains)
    own = gradient(path, make_config(80, packing="padded", preset="cispo", router_replay=True), plan, plain)
    assert np.abs(alone - own).max() > 0.01 * np.abs(own).max(), "replay has changed the gradient"
    tolerance = 1e-5 if "Qwen3_5" in name else 3e-6  # as without replay
    for packing, bin_tokens in (("tree", 4096), ("tree", 80), ("packed", 4096)):
        config = make_config(bin_tokens, packing=packing, preset="cispo", router_replay=True)
        found = gradient(path, config, plan, chains)
        assert np.abs(found - alone).max() <= tolerance * np.abs(alone).max(), (packing, bin_tokens)


def test_adapters_replay_the_same_in_every_packing(tmp_path: Path) -> None:
    """The router is frozen, and its choice is still the recorded one."""
    name = "Qwen3MoeForCausalLM"
    path = make_architecture(name, tmp_path, **arguments_of(name))
    more = {"router_replay": True, "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj"]}}
    family = make_relatives(5)
    plain = [chain for one in family for chain in one.chains([True, False])]
    chains = with_experts(plain, 2)
    plan = make_plan(family, "token_mean")
    learner = RankLearner(path, make_config(4096, **more))
    learner.step(plan, chains)  # while B is 0, A has no gradient
    learner.save_async(str(tmp_path / "checkpoint")).result()

    def gradients(packing: Packing, bin_tokens: int, trained: Sequence[TrainingSequence]) -> npt.NDArray[np.float32]:
        config = make_config(bin_tokens, packing=packing, **more)
        found = adapter_gradients(path, config, plan, trained, str(tmp_path / "checkpoint"))
        return np.concatenate([found[one].ravel() for one in sorted(found)])

    alone, own = gradients("padded", 80, chains), gradients("padded", 80, plain)
    assert np.abs(alone - own).max() > 0.01 * np.abs(own).max(), "replay has changed the gradient"
    for packing, bin_tokens in (("tree", 4096), ("tree", 80), ("packed", 4096)):
        found = gradients(packing, bin_tokens, chains)  # type: ignore[arg-type]
        assert np.abs(found - alone).max() <= 3e-6 * np.abs(alone).max(), (packing, bin_tokens)


def test_layers_without_experts_are_counted(tmp_path: Path) -> None:
    """The engine numbers experts by the layer of the model, and some layers may be dense."""
    name = "Qwen3MoeForCausalLM"
    path = make_architecture(name, tmp_path, **arguments_of(name), num_hidden_layers=3, mlp_only_layers=[1])
    learner = RankLearner(path, make_config(router_replay=True))
    assert [one.number for one in learner.policy.routers] == [0, 2]


def test_what_cannot_be_replayed_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router_replay: Qwen3ForCausalLM has no experts; leave it out"):
        RankLearner(model, make_config(router_replay=True))
    mixtral = make_architecture("MixtralForCausalLM", tmp_path, num_local_experts=4)
    with pytest.raises(ValueError, match="router_replay: MixtralForCausalLM is not registered"):
        RankLearner(mixtral, make_config(router_replay=True))


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    name = "Qwen3MoeForCausalLM"
    learner = RankLearner(
        make_architecture(name, tmp_path, **arguments_of(name)), make_config(4096, router_replay=True)
    )
    family = make_relatives(5)
    members = {member.rollout_id: member for member in make_plan(family, "token_mean").members}
    chains = with_experts([chain for one in family for chain in one.chains([False])], 3)
    with pytest.raises(ValueError, match="experts up to 3, 2 in each of 3 layers, and the model 4 experts, 2 in"):
        learner.accumulate(chains, members)


def test_the_fraction_of_replayed_tokens() -> None:
    """A token is predicted at the one before it."""
    (chain, *_) = make_relatives(5)[0].chains([False])
    assert replay_metrics([chain]) == {}
    experts = RoutedExperts.unknown(len(chain.ids), np.zeros((1, 2, 2), np.uint8))
    trained = np.flatnonzero(chain.mask)
    experts.known[trained[0] - 1] = True
    assert replay_metrics([replace(chain, experts=experts)]) == {"router_replay_fraction": 1 / len(trained)}


def test_the_reference_chooses_by_itself(tmp_path: Path) -> None:
    """It has other weights, and may be dense."""
    name = "Qwen3MoeForCausalLM"
    config = make_config(router_replay=True)
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"reference_kl": 0.1})})
    learner = RankLearner(make_architecture(name, tmp_path, **arguments_of(name)), config)
    assert learner.reference is not None and learner.reference.routers == []
    assert len(learner.policy.routers) == learner.policy.model.config.num_hidden_layers
