"""A class that wraps a text model in a vision tower: its text layers are trained, all else is published as it is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine import policy_files
from ratchet.types import JsonObject
from tests.standins.wrapped_model import fuse_experts, make_wrapped_model, rename_tensor
from tests.unit.training.cuts import gradient, make_config, make_plan, make_relatives, make_rollouts
from tests.unit.training.test_gradients import make_architecture
from training.learner import RankLearner, export_checkpoint
from training.packing import pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import make_inputs

pytestmark = pytest.mark.usefixtures("single_rank")

DENSE, EXPERTS = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    files = {path for path in policy_files.tensor_files(directory).values()}
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def train(learner: RankLearner) -> None:
    rollouts = make_rollouts(6)
    chains = [chain for one in rollouts for chain in one.chains([True])]
    assert learner.step(make_plan(rollouts, "token_mean"), chains).metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
def test_the_gradient_is_that_of_the_text_model_alone(name: str, tmp_path: Path) -> None:
    """Equal bit by bit to that of the class without a vision tower, and equal for trees and rows."""
    import transformers

    wrapped = make_wrapped_model(name, tmp_path / "wrapped")
    text = transformers.AutoModelForCausalLM.from_pretrained(wrapped, dtype=torch.float32)
    assert type(text).__name__ == name.replace("ForConditionalGeneration", "ForCausalLM")
    text._weight_conversions = None  # else transformers writes the names of the class that wraps it
    text.save_pretrained(tmp_path / "text")
    family = make_relatives(5)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]
    alone = gradient(wrapped, make_config(80, packing="padded", preset="cispo"), plan, chains)
    assert np.abs(alone).max() > 1e-3
    tree = make_config(4096, packing="tree", preset="cispo")
    found = gradient(wrapped, tree, plan, chains)
    assert np.abs(found - alone).max() <= 1e-5 * np.abs(alone).max()
    assert np.array_equal(found, gradient(tmp_path / "text", tree, plan, chains))


@pytest.mark.parametrize("layout", ["dense", "tied", "experts one by one", "experts in one tensor"])
def test_a_version_has_the_names_of_the_class_and_its_other_tensors(layout: str, tmp_path: Path) -> None:
    """Load, step, publish, reload: equal bit by bit, and a checkpoint's export has the same files."""
    name = EXPERTS if "experts" in layout else DENSE
    base = make_wrapped_model(name, tmp_path / "base", tie_word_embeddings=layout == "tied")
    if layout == "experts in one tensor":
        fuse_experts(base)
    before = stored_tensors(base)
    learner = RankLearner(base, make_config())
    assert not any("visual" in one or "mtp" in one for one, _ in learner.policy.named_parameters())
    train(learner)
    files = learner.publish(tmp_path / "1.e1")
    assert files == policy_files.describe_files(tmp_path / "1.e1")
    assert (tmp_path / "1.e1" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    after = stored_tensors(tmp_path / "1.e1")
    assert {one: (tensor.shape, tensor.dtype) for one, tensor in after.items()} == {
        one: (tensor.shape, tensor.dtype) for one, tensor in before.items()
    }
    changed = {one for one, tensor in after.items() if not torch.equal(tensor, before[one])}
    assert {one for one in after if "visual" in one or "mtp" in one}.isdisjoint(changed)
    assert {one.partition(".layers.")[0] for one in changed} >= {"model.language_model"}
    assert len(changed) > 0.9 * sum("language_model" in one for one in after)

    again = RankLearner(tmp_path / "1.e1", make_config())
    for mine, theirs in zip(again.policy.parameters(), learner.policy.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())  # type: ignore[attr-defined]
    assert again.publish(tmp_path / "again") == files
    learner.save_async(str(tmp_path / "checkpoint")).result()
    export_checkpoint(base, str(tmp_path / "checkpoint"), tmp_path / "exported")
    assert policy_files.describe_files(tmp_path / "exported") == files


def test_the_published_class_of_transformers_loads_a_version(tmp_path: Path) -> None:
    """Its logits are the learner's, and no tensor of it is missing or left over."""
    import transformers

    base = make_wrapped_model(EXPERTS, tmp_path / "base")
    learner = RankLearner(base, make_config())
    train(learner)
    learner.publish(tmp_path / "1.e1")
    whole, loaded = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "1.e1", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = whole(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        bin = pack_bin([TrainingSequence.of_ids(ids.tolist())], "tree")
        ours = learner.policy(make_inputs(bin, learner.device), 1.0).logprobs
    assert torch.allclose(ours, logprobs, atol=1e-5)


def test_other_tensors_are_linked_from_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that version is gone or damaged, they are read from the base again; files do not depend on it."""
    learner = RankLearner(make_wrapped_model(DENSE, tmp_path / "base"), make_config())

    def untouched(name: str) -> Path:
        return tmp_path / name / policy_files.UNTOUCHED

    monkeypatch.setattr(policy_files, "MAX_FILE_BYTES", 40_000)
    first = learner.publish(tmp_path / "1.e1")
    assert learner.publish(tmp_path / "2.e1") == first
    assert sum(file["name"].startswith("text-") for file in first) > 1
    assert untouched("1.e1").samefile(untouched("2.e1"))
    damaged = bytearray(untouched("2.e1").read_bytes())
    damaged[-1] ^= 1
    untouched("2.e1").write_bytes(damaged)
    assert learner.publish(tmp_path / "3.e1") == first and not untouched("3.e1").samefile(untouched("2.e1"))
    untouched("3.e1").unlink()
    assert learner.publish(tmp_path / "4.e1") == first


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_tensor_that_is_missing_is_named_before_anything_is_trained(wrapped: bool, tmp_path: Path) -> None:
    """transformers would begin with random values in its place."""
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    if wrapped:
        base = make_wrapped_model(EXPERTS, tmp_path / "base")
    else:
        base, name = make_architecture("Qwen3ForCausalLM", tmp_path), name.replace("language_model.", "")
    rename_tensor(base, name, name.replace("q_proj", "query"))
    with pytest.raises(ValueError, match=rf"no file has the tensor {name} \(1 such\)"):
        RankLearner(base, make_config())


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    base = make_wrapped_model(EXPERTS, tmp_path / "base")
    name = "model.language_model.layers.1.mlp.experts.2.up_proj.weight"
    rename_tensor(base, name, "model.visual.extra")
    with pytest.raises(ValueError, match=rf"no file has the tensor {name} \(1 such\)"):
        RankLearner(base, make_config())


def test_an_adapter_has_the_names_of_the_published_class(tmp_path: Path) -> None:
    base = make_wrapped_model(EXPERTS, tmp_path / "base")
    targets = ["q_proj", "in_proj_qkv", "out_proj", "gate_proj"]
    learner = RankLearner(base, make_config(lora={"rank": 4, "target_modules": targets}))
    train(learner)
    files: list[JsonObject] = learner.publish(tmp_path / "1.e1")
    names = load_file(tmp_path / "1.e1" / "adapter_model.safetensors").keys()
    layers = {one.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for one in names}
    assert layers <= policy_files.tensor_files(base).keys() and {one.split(".")[-2] for one in layers} == set(targets)
    learner.save_async(str(tmp_path / "checkpoint")).result()
    export_checkpoint(base, str(tmp_path / "checkpoint"), tmp_path / "exported")
    weights = [one for one in policy_files.describe_files(tmp_path / "exported") if one["name"].startswith("adapter_m")]
    assert weights == [one for one in files if one["name"].startswith("adapter_m")]
