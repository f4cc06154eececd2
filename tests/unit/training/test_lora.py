"""LoRA in the learner: gradients of a loop over PEFT's own model, checkpoints of the adapters alone, exports."""

import json
import multiprocessing
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import adapter_files, policy_files
from ratchet.config import RunConfig
from tests.unit.training.cuts import adapter_gradients, make_config, make_plan, make_relatives, run_adapter_rank
from training import lora
from training.learner import RankLearner, export_checkpoint
from training.packing import pack_bin
from training.plan_types import Plan, TrainingSequence
from training.policy_inputs import make_inputs

pytestmark = [pytest.mark.usefixtures("single_rank"), pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")]
SETTINGS = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def make_step(seed: int = 3) -> tuple[Plan, list[TrainingSequence]]:
    family = make_relatives(seed)
    return make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]


def trained_once(model: Path, config: RunConfig | None = None) -> RankLearner:
    """A learner whose adapters are no longer 0."""
    learner = RankLearner(model, config or make_config(4096, lora=SETTINGS))
    learner.step(*make_step(4))
    return learner


def their_model(adapter: Path, base: Path) -> Any:
    """PEFT's own model, from the published directory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, adapter, is_trainable=True)


def their_gradients(adapter: Path, base: Path, plan: Plan, chains: list[TrainingSequence]) -> dict[str, Any]:
    """Return the gradients of icepop's loss by PEFT's model, each chain alone, under PEFT's names."""
    network = their_model(adapter, base)
    members = {member.rollout_id: member for member in plan.members}
    for chain in chains:
        ids = torch.from_numpy(chain.ids.astype(np.int64))
        logprobs = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(chain.mask[1:])
        ratios = (logprobs[mask] - torch.from_numpy(chain.behaviour[1:])[mask]).exp()
        kept = ((ratios >= 0.5) & (ratios <= 5)).float()
        member = members[chain.rollout_id]
        torch.autograd.backward(-(ratios * kept).sum() * member.advantage * member.weight)
    return {
        name.replace(".default.", "."): parameter.grad.numpy()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def test_gradients_are_those_of_a_loop_over_pefts_model(model: Path, tmp_path: Path) -> None:
    """Trees, chunked logits and shards of one and of two ranks here; whole logits and each chain alone there."""
    learner = trained_once(model)
    learner.publish(tmp_path / "adapter")
    learner.save_async(str(tmp_path / "checkpoint")).result()
    plan, chains = make_step()
    cases = [
        (model, make_config(80, packing=packing, lora=SETTINGS), plan, chains, str(tmp_path / "checkpoint"))
        for packing in ("tree", "padded")
    ]
    request, answer = tmp_path / "request", tmp_path / "answer"
    request.write_bytes(pickle.dumps(cases))
    forks = multiprocessing.get_context("forkserver")
    ranks = [
        forks.Process(target=run_adapter_rank, args=(tmp_path / "meeting", number, 2, request, answer))
        for number in range(2)
    ]
    for process in ranks:
        process.start()
    alone = [adapter_gradients(*case) for case in cases]
    for process in ranks:
        process.join(400)
    assert [process.exitcode for process in ranks] == [0, 0]
    expected = their_gradients(tmp_path / "adapter", model, plan, chains)
    for found in [*alone, *pickle.loads(answer.read_bytes())]:
        assert found.keys() == expected.keys() and len(found) == 2 * 3 * 2  # A and B of three targets in two layers
        for name, gradient in expected.items():
            assert np.linalg.norm(gradient) > 1e-5, name
            assert np.linalg.norm(found[name] - gradient) <= 1e-4 * np.linalg.norm(gradient), name


def test_new_adapters_change_nothing_and_the_base_stays_frozen(model: Path) -> None:
    plain, adapted = (RankLearner(model, make_config(4096, **more)) for more in ({}, {"lora": SETTINGS}))
    assert plain.canary() == adapted.canary()
    before = {name: one.full_tensor().clone() for name, one in adapted.policy.state_dict().items()}
    for _ in range(2):  # A has no gradient while B is 0
        result = adapted.step(*make_step())
    assert result.num_skipped == 0 and result.metrics["grad_norm"] > 0 and result.metrics["update_norm"] > 0
    assert plain.canary() != adapted.canary()
    for name, one in adapted.policy.state_dict().items():
        assert torch.equal(one.full_tensor(), before[name]) != lora.is_adapter_parameter(name), name
    assert {name for name, one in adapted.policy.named_parameters() if one.requires_grad} == set(
        filter(lora.is_adapter_parameter, before)
    )
    assert 0.6 < adapted.work.flops(1000, 100, 10) / plain.work.flops(1000, 100, 10) < 0.7


def test_a_frozen_base_in_bfloat16_computes_what_float32_weights_do(model: Path) -> None:
    """A step casts float32 weights to bfloat16 first. New adapters add 0."""
    adapted = RankLearner(model, make_config(4096, lora=SETTINGS, dtype="bfloat16"))
    whole = RankLearner(model, make_config(4096, dtype="bfloat16"))
    dtypes = {lora.is_adapter_parameter(name): one.dtype for name, one in adapted.policy.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    bin = pack_bin(make_step()[1], adapted.packing)
    inputs = make_inputs(bin, adapted.device)
    found = [one.policy(inputs, 1.0).logprobs for one in (adapted, whole)]
    assert torch.equal(*found)
    adapted.step(*make_step())
    trained = [one for name, one in adapted.policy.named_parameters() if lora.is_adapter_parameter(name)]
    assert any(one.full_tensor().any() for one in trained[1::2]), "B has moved from 0"


def test_the_published_directory_is_what_peft_loads(model: Path, tmp_path: Path) -> None:
    learner = trained_once(model)
    files = learner.publish(tmp_path / "1.e1")
    assert (
        [file["name"] for file in files]
        == [
            adapter_files.CONFIG,
            adapter_files.WEIGHTS,
            adapter_files.BASE,
        ]
        == [file["name"] for file in policy_files.weight_files(files)]
    )
    assert policy_files.is_intact(tmp_path / "1.e1", files)
    assert policy_files.whole_model(tmp_path / "1.e1") == model.resolve()
    merged = their_model(tmp_path / "1.e1", model).merge_and_unload()
    canary = learner.canary()
    ids = torch.tensor(canary["ids"])
    with torch.no_grad():
        theirs = merged(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert np.abs(theirs.numpy() - np.array(canary["logprobs"])).max() < 1e-4
    assert (tmp_path / "1.e1" / adapter_files.WEIGHTS).stat().st_size < (model / "model.safetensors").stat().st_size


def test_an_adapter_on_a_changed_base_is_not_intact(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "0.e0"
    policy_files.link_version(model, base)
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    files = RankLearner(base, make_config(lora=SETTINGS)).publish(tmp_path / "1.e1")
    assert policy_files.is_intact(tmp_path / "1.e1", files)
    damaged = bytearray((base / "model.safetensors").read_bytes())
    damaged[-9] ^= 1
    (base / "model.safetensors").write_bytes(damaged)
    assert not policy_files.is_intact(tmp_path / "1.e1", files)


def test_training_continues_bit_by_bit_from_a_checkpoint_of_the_adapters_alone(model: Path, tmp_path: Path) -> None:
    config = make_config(4096, lora=SETTINGS)
    first = trained_once(model, config)
    first.save_async(str(tmp_path / "checkpoint")).result()
    second = RankLearner(model, config)
    second.load(str(tmp_path / "checkpoint"))
    export_checkpoint(model, str(tmp_path / "checkpoint"), tmp_path / "exported")
    assert policy_files.describe_files(tmp_path / "exported") == second.publish(tmp_path / "now")
    for learner in (first, second):
        learner.step(*make_step())
    assert first.publish(tmp_path / "first") == second.publish(tmp_path / "second")
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    RankLearner(model, make_config()).save_async(str(tmp_path / "whole")).result()
    assert size < sum(path.stat().st_size for path in (tmp_path / "whole").iterdir()) / 2


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lora": SETTINGS | {"rank": 8}}, "was written with rank 4, and this run has 8"),
        ({"lora": SETTINGS | {"alpha": 16}}, r"was written with alpha 8\.0, and this run has 16\.0"),
        ({"lora": SETTINGS | {"target_modules": ["q_proj"]}}, "was written with target_modules"),
        ({}, "was written by a run that trains LoRA, and this one trains all weights"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_by_name(
    model: Path, tmp_path: Path, changed: dict[str, object], sentence: str
) -> None:
    RankLearner(model, make_config(lora=SETTINGS)).save_async(str(tmp_path / "checkpoint")).result()
    with pytest.raises(ValueError, match=f"training.lora: .*{sentence}"):
        RankLearner(model, make_config(**changed)).load(str(tmp_path / "checkpoint"))


def test_a_checkpoint_of_another_base_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    RankLearner(model, make_config(lora=SETTINGS)).save_async(str(tmp_path / "checkpoint")).result()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="was written with base_sha256"):
        RankLearner(other, make_config(lora=SETTINGS)).load(str(tmp_path / "checkpoint"))


def test_targets_that_the_model_does_not_have_are_named(model: Path) -> None:
    with pytest.raises(ValueError, match="no linear layer c_attn; it has down_proj, gate_proj"):
        RankLearner(model, make_config(lora=SETTINGS | {"target_modules": ["q_proj", "c_attn"]}))


@pytest.mark.parametrize(
    ("training", "more", "sentence"),
    [
        ({"lora": {"target_modules": ["lm_head"]}}, {}, "embedding and output layer have no adapter"),
        ({"lora": {}}, {"engines": [{"address": "http://10.0.0.9:8000"}]}, "must be started by this stack"),
        ({"lora": {"rank": 0}}, {}, "greater than 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    training: dict[str, object], more: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunConfig.model_validate({"datasets": [{"path": "unused.jsonl"}], "training": training, **more})


def test_the_config_file_is_the_same_in_every_process(model: Path) -> None:
    settings = make_config(lora=SETTINGS).training.lora
    assert settings is not None
    config = lora.peft_config(settings, model)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["down_proj", "q_proj", "v_proj"])
    assert json.dumps(config) == json.dumps(lora.peft_config(settings, model))
