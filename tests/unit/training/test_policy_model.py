"""Chunked logprobs and entropies equal the plain formula, and so do their gradients."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from ratchet.config import RunConfig
from tests.unit.training.cuts import gradient, make_config, make_plan, make_rollouts
from tests.unit.training.test_gradients import make_architecture
from training.learner import RankLearner
from training.policy_model import ForwardWork, TrainablePolicy, _ChosenLogprobs, pair_cost, why_no_positions

NUM_PREDICTED, HIDDEN, VOCAB = 23, 8, 37


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(
    "num_logits", [1, 5 * VOCAB, 1 << 26], ids=["one by one", "a last chunk that is smaller", "all at once"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_chunks_are_the_plain_formula(num_logits: int, temperature: float, bonus: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(NUM_PREDICTED, HIDDEN), torch.randn(VOCAB, HIDDEN)
    targets, upstream = torch.randint(0, VOCAB, (NUM_PREDICTED,)), torch.randn(NUM_PREDICTED)
    exact_hidden, exact_weight = (part.double().requires_grad_() for part in (hidden, weight))
    for part in (hidden, weight):
        part.requires_grad_()
    expected = plain(exact_hidden, exact_weight, targets, temperature)
    found = _ChosenLogprobs.apply(hidden, weight, targets, temperature, False, num_logits)  # type: ignore[no-untyped-call]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    for (logprobs, entropies), weights in ((expected, upstream.double()), (found, upstream)):
        torch.autograd.backward(((logprobs + bonus * entropies) * weights).sum())
    for one, other in ((hidden, exact_hidden), (weight, exact_weight)):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("single_rank")
def test_the_entropy_bonus_is_the_gradient_of_the_whole_distribution_s_entropy(model: Path) -> None:
    """The bonus's part of a step's gradient equals that of the plain formula on transformers' own logits."""
    from transformers import AutoModelForCausalLM

    bonus, rollouts = 0.7, make_rollouts(4)
    plan = make_plan(rollouts, "token_mean")
    chains = [chain for one in rollouts for chain in one.chains([True])]
    without = make_config(4096)
    values = without.model_dump(mode="json")
    values["loss"]["entropy_bonus"] = bonus
    added = gradient(model, RunConfig.model_validate(values), plan, chains) - gradient(model, without, plan, chains)

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = {member.rollout_id: member.weight for member in plan.members}
    for one in chains:
        logprobs = network(torch.from_numpy(one.ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        torch.autograd.backward(-bonus * weights[one.rollout_id] * entropies[torch.from_numpy(one.mask[1:])].sum())
    expected = np.concatenate(
        [parameter.grad.flatten().numpy() for parameter in network.parameters() if parameter.grad is not None]
    )
    assert np.abs(expected).max() > 1e-3
    assert np.abs(added - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_gets_the_tree_itself(model: Path, dtype: str) -> None:
    """FSDP looks through lists and dataclasses in the inputs of every layer, and copies them if it casts."""
    rollouts = make_rollouts(4)
    values = make_config(4096).model_dump(mode="json")
    values["training"]["dtype"] = dtype
    learner = RankLearner(model, RunConfig.model_validate(values))
    trees = []
    layers = learner.policy.model.get_decoder().layers
    for layer in layers:  # FSDP's own hook, which casts the inputs, is the first
        layer.register_forward_pre_hook(lambda _, __, more: trees.append(more["tree"]), with_kwargs=True)
    members = {member.rollout_id: member for member in make_plan(rollouts, "token_mean").members}
    learner.accumulate([chain for one in rollouts for chain in one.chains([True])], members)
    assert len(trees) >= len(layers) > 1
    assert len({id(tree) for tree in trees}) == 1


def test_only_the_experts_that_a_token_passes_count_as_work() -> None:
    """A Qwen3-MoE of 4 experts, of which 2 are chosen, counted by hand; its files are not needed."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    with torch.device("meta"):
        policy = TrainablePolicy(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **moe)))
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 8  # query, key and value, output, two norms of a head
    layer = attention + 4 * 32 + 2 * 32 + 2 * 3 * 32 * 16  # router, two norms, two chosen experts
    work = ForwardWork.of(policy)
    assert (work.body, work.head) == (2 * layer + 32, 320 * 32)
    assert pair_cost(policy) == 4 * 4 * 8 * 2 / (2 * (2 * layer + 32 + 2 * 320 * 32))


def test_a_gpu_computes_in_bfloat16_by_default() -> None:
    from training.policy_loading import compute_dtype

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [compute_dtype("auto", one) for one in (cpu, gpu)] == [torch.float32, torch.bfloat16]
    assert compute_dtype("float32", gpu) == torch.float32


@pytest.mark.usefixtures("single_rank")
def test_positions_that_depend_on_the_longest_chain_of_a_pass_are_refused(tmp_path: Path) -> None:
    """Beyond their limit a chain's gradient would depend on the packing, and ranks that share a bin would disagree."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48, **factors}
    path = make_architecture("LlamaForCausalLM", tmp_path, rope_parameters=rope)
    with pytest.raises(ValueError, match=r"\(longrope\) depend on the longest chain .* more than 48 tokens; set sampl"):
        RankLearner(path, make_config())  # its longest chain has 64 tokens
    settings = AutoConfig.from_pretrained(path)
    assert why_no_positions(settings, 48) is None
    rope["rope_type"] = "yarn"
    assert why_no_positions(SimpleNamespace(rope_parameters={"full_attention": rope}), 64) is None
    rope["rope_type"] = "dynamic"
    reason = why_no_positions(SimpleNamespace(rope_parameters={"full_attention": rope}), 64)
    assert reason is not None and "(dynamic)" in reason
    longer = rope | {"original_max_position_embeddings": 96}
    for names in (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]):
        of_layers = SimpleNamespace(rope_parameters=dict(zip(names, (longer, rope), strict=True)))
        assert why_no_positions(of_layers, 64) == reason, "the smallest limit of all types of layers"
