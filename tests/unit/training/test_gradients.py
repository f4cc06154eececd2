"""Gradients do not depend on chains, bins, micro-batches or ranks, and a learner's state is complete in its files."""

import json
import multiprocessing
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine import policy_files
from tests.unit.training.cuts import (
    NUM_IDS,
    gradient,
    make_config,
    make_plan,
    make_relatives,
    make_rollouts,
    run_rank,
    step_outcome,
)
from training import attention_kernels
from training.checkpoint import DamagedCheckpointError
from training.learner import RankLearner
from training.metrics import token_metrics
from training.packing import pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import make_inputs
from training.policy_model import SEGMENT_ARCHITECTURES

pytestmark = pytest.mark.usefixtures("single_rank")

REDUCERS = ["token_mean", "rollout_mean", "prompt_mean", "constant"]


def assert_same(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> None:
    assert np.abs(other).max() > 1e-4, "the gradient is zero"
    assert np.abs(one - other).max() <= 1e-6 * max(1.0, float(np.abs(other).max()))


@given(
    st.integers(0, 1000),
    st.sampled_from(REDUCERS),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.sampled_from([64, 100, 256, 4096]),
    st.sampled_from(["tree", "packed", "padded"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chains_bins_and_order(
    model: Path, seed: int, reducer: str, cuts: list[bool], bin_tokens: int, packing: str, random: object
) -> None:
    rollouts = make_rollouts(seed)
    plan = make_plan(rollouts, reducer)
    whole = gradient(
        model, make_config(4096, packing="padded"), plan, [chain for one in rollouts for chain in one.chains([False])]
    )
    pieces = [chain for one in rollouts for chain in one.chains(cuts)]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    assert_same(gradient(model, make_config(bin_tokens, packing=packing), plan, pieces), whole)


@given(
    st.integers(0, 1000),
    st.sampled_from([80, 130, 4096]),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from(["icepop", "gspo", "seq_mis", "cispo"]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rollouts_that_share_sampled_tokens(
    model: Path, seed: int, bin_tokens: int, cuts: list[bool], preset: str
) -> None:
    """Separate, packed and tree agree if advantages are opposite and recorded logprobs differ on the same tokens."""
    family = make_relatives(seed)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains(cuts)]
    alone = gradient(model, make_config(80, preset=preset, packing="padded"), plan, chains)
    for packing in ("packed", "tree"):
        assert_same(gradient(model, make_config(bin_tokens, preset=preset, packing=packing), plan, chains), alone)


@pytest.mark.parametrize("training", [{"activation_checkpointing": True}, {"fp32_head": True}])
def test_saving_memory_does_not_change_the_gradient(model: Path, training: dict[str, object]) -> None:
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True])]
    assert_same(
        gradient(model, make_config(4096, **training), plan, chains), gradient(model, make_config(4096), plan, chains)
    )


def test_bfloat16_points_the_same_way(model: Path) -> None:
    """Rounding is visible, the direction is kept, and the master weights stay float32."""
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True])]
    exact, rounded = (
        gradient(model, make_config(4096, dtype=dtype), plan, chains) for dtype in ("float32", "bfloat16")
    )
    assert exact.dtype == rounded.dtype == np.float32
    assert 0.99 < float(exact @ rounded) / float(np.linalg.norm(exact) * np.linalg.norm(rounded)) < 1 - 1e-7


def test_two_ranks(model: Path, tmp_path: Path) -> None:
    """With more sequences than ranks, an odd number of bins, a rank without bins, shared sampled tokens, and with a
    copy of the weights on each rank. Only rank 0 reads the model.
    """
    cases = []
    for seed, bin_tokens, packing in ((11, 80, "tree"), (12, 4096, "tree"), (13, 4096, "packed"), (14, 80, "padded")):
        family = make_relatives(seed)
        chains = [chain for one in family for chain in one.chains([True, False])]
        cases.append((model, make_config(bin_tokens, packing=packing), make_plan(family, "token_mean"), chains))
    family = make_relatives(15)
    chains = [chain for one in family for chain in one.chains([True])]
    cases.append((model, make_config(80, shard_ranks=1), make_plan(family, "token_mean"), chains))  # a copy per rank
    for seed, count, cuts, bin_tokens in (
        (1, 4, [True], 64),
        (2, 3, [False], 64),
        (3, 1, [False], 256),
        (4, 4, [True, False], 100),
    ):
        rollouts = make_rollouts(seed, count)
        plan = make_plan(rollouts, REDUCERS[seed % 4])
        cases.append((model, make_config(bin_tokens), plan, [chain for one in rollouts for chain in one.chains(cuts)]))
    request, answer = tmp_path / "request", tmp_path / "answer"
    request.write_bytes(pickle.dumps(cases))
    forks = multiprocessing.get_context("forkserver")
    ranks = [
        forks.Process(target=run_rank, args=(tmp_path / "meeting", number, 2, request, answer)) for number in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
    assert [process.exitcode for process in ranks] == [0, 0]
    for case, found in zip(cases, pickle.loads(answer.read_bytes()), strict=True):
        alone = step_outcome(*case)
        assert_same(found.gradient, alone.gradient)
        assert [one.logprob - one.behaviour for one in found.largest_ratios] == pytest.approx(
            [one.logprob - one.behaviour for one in alone.largest_ratios], abs=1e-4
        )
        assert {one.rollout_id for one in found.largest_ratios} <= {one.rollout_id for one in case[2].members}
        for one, other in zip(found.trained_turns, alone.trained_turns, strict=True):
            assert (one.turn_id, one.rollout_id, one.start) == (other.turn_id, other.rollout_id, other.start)
            np.testing.assert_allclose(one.entropies, other.entropies, rtol=2e-3, atol=1e-3)
            np.testing.assert_allclose(one.log_ratios, other.log_ratios, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_on_each_chain_alone(model: Path, temperature: float) -> None:
    """With recorded logprobs of the same weights, every ratio is 1 and there is no mismatch."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences = []
    for one in (chain for rollout in make_rollouts(5, temperature=temperature) for chain in rollout.chains([True])):
        ids = torch.from_numpy(one.ids.astype(np.int64))
        with torch.no_grad():
            logprobs = (plain(ids[None]).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        one.behaviour[1:] = np.where(one.mask[1:], logprobs.numpy(), 0)
        sequences.append(one)
    sums = RankLearner(model, make_config()).accumulate(
        sequences, {member.rollout_id: member for member in make_plan(make_rollouts(5), "token_mean").members}
    )
    metrics = token_metrics(sums.as_list())
    assert metrics["mismatch_abs"] < 1e-5 and metrics["masked_fraction"] == 0
    assert metrics["trained_tokens"] == sum(one.num_tokens for one in make_rollouts(5))


@pytest.mark.parametrize("broken", ["a recorded logprob", "an advantage"])
def test_an_update_without_a_finite_gradient_changes_nothing_and_its_metrics_are_finite(
    model: Path, broken: str
) -> None:
    """The second of two updates is left out, and the learner is as after the first."""
    rollouts = make_rollouts(6)
    plan = make_plan(rollouts, "token_mean")
    members = [replace(member, update=member.rollout_id % 2) for member in plan.members]
    chains = [chain for one in rollouts for chain in one.chains([True])]
    if broken == "an advantage":
        members = [replace(one, advantage=float("inf")) if one.update else one for one in members]
    else:
        chains = [
            replace(one, behaviour=np.full_like(one.behaviour, np.nan)) if one.rollout_id % 2 else one for one in chains
        ]
    learner, undisturbed = (RankLearner(model, make_config(preset="cispo")) for _ in range(2))
    result = learner.step(replace(plan, members=members, knobs=plan.knobs | {"updates_per_step": 2}), chains)
    assert result.num_skipped == 1 == result.metrics["skipped_updates"]
    assert all(np.isfinite(list(result.metrics.values()))) and result.metrics["nonfinite_metrics"] > 0
    assert all(np.isfinite(one.logprob - one.behaviour) for one in result.largest_ratios)
    undisturbed.step(replace(plan, members=members), [one for one in chains if one.rollout_id % 2 == 0])
    for mine, theirs in zip(learner.policy.parameters(), undisturbed.policy.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())  # type: ignore[attr-defined]


def test_the_published_weights_are_the_trained_ones(model: Path, tmp_path: Path) -> None:
    """The directory is complete: transformers loads it with the learner's logits, and tied tensors are stored once."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = RankLearner(model, make_config())
    rollouts = make_rollouts(6)
    result = learner.step(
        make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True])]
    )
    assert result.num_skipped == 0 and result.metrics["grad_norm"] > 0
    files = learner.publish(tmp_path / "1.e1")
    assert {file["name"] for file in files} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert not (tmp_path / "1.e1.building").exists()
    loaded, initial = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tmp_path / "1.e1", model)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "1.e1").vocab_size > 0
    with safe_open(tmp_path / "1.e1" / "model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118
    ids = torch.randint(0, NUM_IDS, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bin = pack_bin([TrainingSequence.of_ids(ids[0].tolist())], "tree")
        ours, _ = learner.policy(make_inputs(bin, learner.device), 1.0)
        theirs, before = (
            one(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] for one in (loaded, initial)
        )
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert not torch.allclose(ours, before, atol=1e-4)


def test_publishing_gathers_the_models_own_dtype_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master weights are float32; gathering them before the cast would take twice the bytes."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    (base / "config.json").write_text(
        json.dumps(json.loads((base / "config.json").read_text()) | {"dtype": "bfloat16"})
    )
    learner = RankLearner(base, make_config())
    gathered: list[int] = []
    whole = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> Tensor:
        gathered.append(tensor.numel() * tensor.element_size())
        return whole(tensor, **options)

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    monkeypatch.setattr(policy_files, "MAX_FILE_BYTES", 40_000)
    files = learner.publish(tmp_path / "1.e1")
    names = {file["name"] for file in files}
    parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
    assert sum(gathered) == 2 * parameters
    assert "model.safetensors.index.json" in names and len(policy_files.weight_files(files)) > 2
    assert files == policy_files.describe_files(tmp_path / "1.e1")
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "1.e1")
    for name, parameter in loaded.named_parameters():
        expected = dict(learner.policy.model.named_parameters())[name].full_tensor()
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected.to(torch.bfloat16))


def test_training_continues_bit_by_bit_from_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """Including tied embeddings, moments and schedule; it is written while the next steps change them."""
    rollouts = make_rollouts(7)
    plan, sequences = make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True])]
    first, second = RankLearner(model, make_config()), RankLearner(model, make_config())
    first.step(plan, sequences)
    writing = first.save_async(str(tmp_path / "checkpoint"))
    for _ in range(2):
        first.step(plan, sequences)
    writing.result()
    second.load(str(tmp_path / "checkpoint"))
    for _ in range(2):
        second.step(plan, sequences)
    assert first.publish(tmp_path / "first") == second.publish(tmp_path / "second")


@pytest.mark.parametrize(("saved", "wanted"), [(False, True), (True, False)])
def test_the_optimiser_s_kernels_are_those_of_the_machine_that_loads(
    model: Path, tmp_path: Path, saved: bool, wanted: bool
) -> None:
    """A run that goes on on a GPU, or with divided experts, uses their kernels and not those of its checkpoint."""
    rollouts = make_rollouts(7)
    plan, sequences = make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True])]
    first, second = RankLearner(model, make_config()), RankLearner(model, make_config())
    for learner, fused in ((first, saved), (second, wanted)):
        learner.optimiser = torch.optim.AdamW(learner.trained, lr=1e-3, fused=fused)
        learner.schedule = torch.optim.lr_scheduler.LambdaLR(learner.optimiser, lambda _: 1.0)
    first.step(plan, sequences)
    first.save_async(str(tmp_path / "checkpoint")).result()
    second.load(str(tmp_path / "checkpoint"))
    assert [group["fused"] for group in second.optimiser.param_groups] == [wanted]
    second.step(plan, sequences)
    assert all(float(state["step"]) == 2 for state in second.optimiser.state.values())


def test_an_exported_checkpoint_equals_the_published_weights(model: Path, tmp_path: Path) -> None:
    from training.learner import export_checkpoint

    rollouts = make_rollouts(7)
    learner = RankLearner(model, make_config())
    learner.step(make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True])])
    learner.save_async(str(tmp_path / "checkpoint")).result()
    export_checkpoint(model, str(tmp_path / "checkpoint"), tmp_path / "exported")
    assert learner.publish(tmp_path / "published") == policy_files.describe_files(tmp_path / "exported")


def test_a_checkpoint_of_another_model_is_refused_before_a_tensor_is_read(model: Path, tmp_path: Path) -> None:
    learner = RankLearner(model, make_config())
    learner.save_async(str(tmp_path / "checkpoint")).result()
    other = RankLearner(make_architecture("Qwen3ForCausalLM", tmp_path), make_config())
    with pytest.raises(ValueError, match=r"is a checkpoint of another model: (only the|.* has shape)"):
        other.load(str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoint" / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match="is no complete checkpoint"):
        learner.load(str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["reads another head's log-sum-exp", "loses what branches owe to their prefix"])
def test_a_kernel_with_wrong_gradients_is_refused_when_a_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: str
) -> None:
    """Its forward pass is right, so only the gradients of a forked batch show it."""
    right = attention_kernels.backward

    def wrong(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value, whole, group, scale = given
        if fault.startswith("reads"):
            return right(grad, query, key, value, whole._replace(lse=whole.lse.roll(1, 0)), group, scale)
        found = right(*given)
        return found if group.causal else (found[0], torch.zeros_like(found[1]), found[2])

    monkeypatch.setattr(attention_kernels, "backward", wrong)
    with pytest.raises(ValueError, match=r"gradient of a batch differs.*use training.packing: padded"):
        RankLearner(model, make_config(dtype=dtype))
    RankLearner(model, make_config(packing="padded", dtype=dtype))


def test_a_model_that_cannot_be_read_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match="the model cannot be loaded: OSError"):
        RankLearner(tmp_path, make_config())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:500])
    with pytest.raises(ValueError, match="the model cannot be loaded: SafetensorError"):
        RankLearner(tmp_path, make_config())


def test_ranks_of_a_copy_must_divide_all_ranks(model: Path) -> None:
    with pytest.raises(ValueError, match="shard_ranks: 2 does not divide the number of ranks, 1"):
        RankLearner(model, make_config(shard_ranks=2))


def test_a_checkpoint_whose_numbers_have_changed_is_damaged(model: Path, tmp_path: Path) -> None:
    """DCP would load it without a word: the file is complete, and sixteen of its numbers are others."""
    learner = RankLearner(model, make_config())
    learner.save_async(str(tmp_path / "checkpoint")).result()
    learner.load(str(tmp_path / "checkpoint"))
    (file,) = (tmp_path / "checkpoint").glob("*.distcp")
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = np.full(16, 7.77, np.float32).tobytes()
    file.write_bytes(data)
    before = learner.publish(tmp_path / "before")
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} has changed since it was written"):
        learner.load(str(tmp_path / "checkpoint"))
    assert learner.publish(tmp_path / "after") == before, "nothing of it was loaded"


def test_an_architecture_that_changes_its_logits_is_refused(model: Path, tmp_path: Path) -> None:
    """Soft-capped logits would train another policy than the one that was sampled."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=1.0,
    )
    config.final_logit_softcapping = 0.5
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")
    with pytest.raises(ValueError, match="changes its logits"):
        RankLearner(tmp_path / "capped", make_config())


TINY = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def make_architecture(name: str, directory: Path, **more: object) -> Path:
    import transformers

    torch.manual_seed(0)
    config = name.replace("ForCausalLM", "TextConfig" if "Qwen3_5" in name else "Config")
    settings = getattr(transformers, config)(**TINY | more)
    model = getattr(transformers, name)(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # far from linear, so that a wrong mask changes the result
    model.save_pretrained(directory / name)
    return directory / name


def arguments_of(name: str) -> dict[str, object]:
    """Return the configuration values of an architecture that differ from TINY."""
    moe: dict[str, object] = {**MOE, "shared_expert_intermediate_size": 16} if "Moe" in name else {}
    return moe | (DELTA_NET if "Qwen3_5" in name else {"sliding_window": None} if "Mistral" in name else {})


@pytest.mark.parametrize("name", sorted(SEGMENT_ARCHITECTURES))
def test_each_registered_architecture_is_exact(name: str, tmp_path: Path) -> None:
    path = make_architecture(name, tmp_path, **arguments_of(name))
    family = make_relatives(5)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]
    alone = gradient(path, make_config(80, packing="padded", preset="cispo"), plan, chains)
    assert np.abs(alone).max() > 1e-3
    # The delta rule sums in chunks that restart at every fork, which changes the rounding.
    tolerance = 1e-5 if "Qwen3_5" in name else 3e-6
    for packing, bin_tokens in (("tree", 4096), ("tree", 80), ("packed", 4096)):
        found = gradient(path, make_config(bin_tokens, packing=packing, preset="cispo"), plan, chains)
        assert np.abs(found - alone).max() <= tolerance * np.abs(alone).max(), (packing, bin_tokens)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}, "sliding window of 16"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "sliding_attention",
        ),
        ("Qwen3MoeForCausalLM", {**MOE, "output_router_logits": True}, "auxiliary loss"),
        ("LlamaForCausalLM", {"attention_dropout": 0.1}, "attention dropout"),
        ("GemmaForCausalLM", {}, "GemmaForCausalLM is not registered"),
    ],
)
def test_a_tree_is_refused_with_the_reason_if_it_would_be_wrong(
    name: str, more: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = make_architecture(name, tmp_path, **more)
    with pytest.raises(ValueError, match=rf"training.packing: tree cannot be used: .*{reason}"):
        RankLearner(path, make_config(packing="tree"))
    assert RankLearner(path, make_config(packing="auto")).packing == "padded"
