"""The real vLLM returns the experts that it chose, and with them the learner agrees with it as on a dense model.

In bfloat16, in which both round differently. `make slow` runs it, in four minutes on idle cores: vLLM starts four
times.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.client import EngineClient
from engine.generate_request import IdsText, Sampling
from engine.generation import Generation, SampledTokens
from engine.process import vllm_process
from engine.weight_update import load_from_files, replace_weights, score_canary
from ratchet.routed_experts import RoutedExperts
from store.engines import PublishedPolicy
from tests.cpu_vllm import cpu_settings, wait_until_healthy
from tests.integration.engine.real_vllm import never_stop, train
from tests.integration.engine.test_vllm_vision_class import SIZES as WRAPPED_SIZES
from tests.standins.tiny_model import make_tokenizer
from tests.standins.wrapped_model import TEXT, make_wrapped_model
from tests.unit.training.cuts import make_config
from tests.unit.training.test_gradients import make_architecture
from training.learner import RankLearner
from training.metrics import token_metrics
from training.plan_types import Member, TrainingSequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("single_rank")]

SIZES = {
    "vocab_size": 640,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
NUM_EXPERTS, CHOSEN, EXPERT_SIZE = 64, 4, 32
DENSE = {"intermediate_size": CHOSEN * EXPERT_SIZE}
MOE = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": EXPERT_SIZE,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
WRAPPED_LAYERS = len(TEXT["layer_types"])  # type: ignore[arg-type]
PROMPTS = [np.random.default_rng(number).integers(0, 600, 40).tolist() for number in range(16)]
NEW_TOKENS = 96


async def sample(model: Path, home: Path, router_replay: bool, *args: str) -> list[Generation]:
    """Let vLLM continue all prompts at once, and check later calls if it returns experts."""
    home.mkdir()
    make_tokenizer(model)
    never_stop(model)
    more = {"dtype": "bfloat16", "max_num_seqs": 16, "args": ("--enforce-eager", *args)}
    settings = cpu_settings(model, home, router_replay=router_replay, **more)
    async with vllm_process(settings, model) as process, EngineClient(settings.address) as client:
        await wait_until_healthy(client, process)
        found = await continue_prompts(client)
        if router_replay:
            await check_later_calls(client, found[0])
        return found


async def continue_prompts(client: EngineClient) -> list[Generation]:
    sampling = [Sampling(NEW_TOKENS, 1.0, seed=number) for number in range(len(PROMPTS))]
    calls = (
        client.generate(prompt, one, str(number))
        for number, (prompt, one) in enumerate(zip(PROMPTS, sampling, strict=True))
    )
    return await asyncio.gather(*calls)


async def check_later_calls(client: EngineClient, first: Generation) -> None:
    """A call that continues the first one, whose prefix is cached, and one that is paused and computed again."""
    stream = [*PROMPTS[0], *first.token_ids.tolist()]
    again = await client.generate(stream, Sampling(1, 1.0, experts_from=len(PROMPTS[0])), "again")
    assert first.routed_experts is not None and again.routed_experts is not None
    assert len(again.routed_experts) == len(first.token_ids), "the last one is computed with the next call"
    same = again.routed_experts[:-1] == first.routed_experts[len(PROMPTS[0]) :]
    assert same.mean() > 0.9
    sampled = SampledTokens()
    call = asyncio.create_task(
        client.stream(IdsText.of(PROMPTS[1]), Sampling(300, 1.0, experts_from=8), "paused", None, sampled)
    )
    while len(sampled.token_ids) < 20:
        assert not call.done()
        await asyncio.sleep(0.01)
    await client.pause()
    await client.resume()
    await call
    paused = sampled.generation()
    assert paused.routed_experts is not None
    assert len(paused.routed_experts) == len(PROMPTS[1]) - 8 + len(paused.token_ids) - 1


def sequences(generations: Sequence[Generation], num_layers: int = 0) -> list[TrainingSequence]:
    """Return the outputs as chains. `num_layers`: of the model, whose experts are then replayed."""
    found = []
    for number, (prompt, one) in enumerate(zip(PROMPTS, generations, strict=True)):
        ids = np.concatenate([np.array(prompt, np.int32), one.token_ids])
        mask = np.arange(len(ids)) >= len(prompt)
        behaviour = np.concatenate([np.zeros(len(prompt), np.float32), one.logprobs])
        experts = None
        if num_layers:
            assert one.routed_experts is not None
            assert one.routed_experts.shape == (len(ids) - 1, num_layers, CHOSEN)
            assert one.routed_experts.dtype == np.uint8
            experts = RoutedExperts.unknown(len(ids), one.routed_experts)
            experts.fill(0, one.routed_experts)
        turns = np.full(len(ids), number)
        found.append(TrainingSequence(number, ids, mask, behaviour, turns, 1.0, experts=experts))
    return found


def mismatch(model: Path, chains: Sequence[TrainingSequence], router_replay: bool) -> dict[str, float]:
    """Return how far a new learner's logprobs are from the recorded ones, at equal weights."""
    return mismatch_of(RankLearner(model, make_config(8192, dtype="bfloat16", router_replay=router_replay)), chains)


def mismatch_of(learner: RankLearner, chains: Sequence[TrainingSequence]) -> dict[str, float]:
    members = {one.rollout_id: Member(one.rollout_id, 0, None, 0.0, 0.0, 1, 0, 0.0) for one in chains}
    sums = learner.accumulate(chains, members)
    metrics = token_metrics(sums.as_list())
    return {name: metrics[name] for name in ("mismatch_abs", "mismatch_kl")} | {"mismatch_max": sums.peak_mismatch}


async def test_replay_leaves_the_mismatch_of_a_dense_model(tmp_path: Path) -> None:
    dense = make_architecture("Qwen3ForCausalLM", tmp_path, **SIZES, **DENSE)
    of_dense = await sample(dense, tmp_path / "dense", router_replay=False)
    moe = make_architecture("Qwen3MoeForCausalLM", tmp_path, **SIZES, **MOE)
    of_moe = await sample(moe, tmp_path / "moe", router_replay=True)
    found = {
        "dense": mismatch(dense, sequences(of_dense), router_replay=False),
        "experts": mismatch(moe, sequences(of_moe), router_replay=True),
        "experts, replayed": mismatch(moe, sequences(of_moe, SIZES["num_hidden_layers"]), router_replay=True),
    }
    print(found)
    for name in ("mismatch_abs", "mismatch_kl", "mismatch_max"):
        replayed = found["experts, replayed"][name]
        assert replayed < 1.2 * found["dense"][name] and replayed < found["experts"][name] / 2, name


async def test_replay_with_gated_delta_net_layers_and_a_vision_tower(tmp_path: Path) -> None:
    experts = {"num_experts": 32, "num_experts_per_tok": CHOSEN}
    name = "Qwen3_5MoeForConditionalGeneration"
    moe = make_wrapped_model(name, tmp_path / name, "bfloat16", **WRAPPED_SIZES, **experts)
    outputs = await sample(moe, tmp_path / "home", True, "--language-model-only")
    own = mismatch(moe, sequences(outputs), router_replay=True)
    replayed = mismatch(moe, sequences(outputs, WRAPPED_LAYERS), router_replay=True)
    print({"experts": own, "experts, replayed": replayed})
    for metric in ("mismatch_abs", "mismatch_kl", "mismatch_max"):
        assert replayed[metric] < own[metric] / 2, metric


def make_experts(root: Path, name: str) -> Path:
    """Make a toy model of the class `name` below `root`; that of Qwen3.5 has shared experts and a vision tower."""
    if name == "Qwen3MoeForCausalLM":
        base = make_architecture(name, root, **SIZES, **MOE)
    else:
        experts = {"num_experts": 32, "num_experts_per_tok": CHOSEN}
        base = make_wrapped_model(name, root / name, "bfloat16", **WRAPPED_SIZES, **experts)
    make_tokenizer(base)
    never_stop(base)
    return base


@pytest.mark.parametrize(
    ("name", "targets", "num_layers"),
    [
        ("Qwen3MoeForCausalLM", ["q_proj", "k_proj", "v_proj", "o_proj"], SIZES["num_hidden_layers"]),
        # vLLM computes the gate of the shared expert by a second name of it.
        ("Qwen3_5MoeForConditionalGeneration", ["shared_expert_gate", "down_proj", "q_proj"], WRAPPED_LAYERS),
    ],
)
async def test_adapters_beside_experts(name: str, targets: list[str], num_layers: int, tmp_path: Path) -> None:
    """vLLM serves an adapter of linear layers and returns experts, which a learner of that adapter replays."""
    root, home = tmp_path / "policies", tmp_path / "home"
    for directory in (root, home):
        directory.mkdir()
    base = make_experts(root, name)
    lora = {"rank": 4, "alpha": 32, "target_modules": targets}
    config = make_config(8192, dtype="bfloat16", router_replay=True, learning_rate=3e-2, lora=lora)
    learner = RankLearner(base, config)
    before, after = train(learner, num_steps=4, least_gap=0.2)
    policy = PublishedPolicy("run-1/1.e1", str(root / "1.e1"), learner.publish(root / "1.e1"), after)
    more = {"dtype": "bfloat16", "max_num_seqs": 16, "policies_root": root, "lora_rank": lora["rank"]}
    args = ("--enforce-eager", *(["--language-model-only"] if "Conditional" in name else []))
    settings = cpu_settings(base, home, router_replay=True, args=args, **more)
    async with vllm_process(settings, base) as process, EngineClient(settings.address) as client:
        await wait_until_healthy(client, process)
        assert (await score_canary(client, before)).reason is None, "an empty adapter is the base"
        await client.init_weight_transfer(str(root), settings.adapter)
        await replace_weights(client, policy.version, load_from_files(policy, root))
        served = await score_canary(client, after, before)
        print({"canary_gap_mean": served.mean_gap, "canary_gap_max": served.max_gap})
        assert served.reason is None and (await score_canary(client, before)).reason is not None
        outputs = await continue_prompts(client)
    own = mismatch_of(learner, sequences(outputs))
    replayed = mismatch_of(learner, sequences(outputs, num_layers))
    print({"adapters": own, "adapters, replayed": replayed})
    # Most tokens keep their experts: the largest differences are those of other experts, the mean is also of rounding.
    assert replayed["mismatch_abs"] < own["mismatch_abs"]
    for metric in ("mismatch_kl", "mismatch_max"):
        assert replayed[metric] < own[metric] / 2, metric
