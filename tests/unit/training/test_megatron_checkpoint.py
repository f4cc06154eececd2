"""A distributed checkpoint of Megatron-core gives the logits of the transformers model that its weights came from."""

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from transformers import AutoConfig

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.model_directory import megatron_checkpoint, require_model
from stack.learner_models import LearnerModels
from tests.unit.training.test_gradients import DELTA_NET, MOE, make_architecture
from training import model_files
from training.megatron_checkpoint import load, why_another_model

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS_OF_PADDING = 64


def as_megatron(model: Any, stacked: bool) -> dict[str, Any]:
    """Return the model's weights under Megatron-core's names and in its layout: of all layers together if `stacked`."""
    config = model.config
    weights = model.state_dict()
    padding = torch.randn(ROWS_OF_PADDING, config.hidden_size)
    found = {
        "embedding.word_embeddings.weight": torch.cat([weights["model.embed_tokens.weight"], padding]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "optimizer.state.exp_avg.output_layer.weight": padding,
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_1": [1],
        "rng_state/shard_0_1": {"of": "this rank"},
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = torch.cat([weights["lm_head.weight"], padding])
    layers = []
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        own = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
        layers.append(layer_as_megatron(own, config))
    for number, layer in enumerate([] if stacked else layers):
        found |= {f"decoder.layers.{number}.{name}": one for name, one in layer.items()}
    for name in layers[0] if stacked else []:
        found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
    return found


def layer_as_megatron(own: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    found = {}
    groups = config.num_key_value_heads
    for end in ("weight", "bias"):
        if f"self_attn.q_proj.{end}" in own:
            queries, keys, values = (own.pop(f"self_attn.{one}_proj.{end}").chunk(groups) for one in "qkv")
            rows = []
            for query, key, value in zip(queries, keys, values, strict=True):
                heads = query.split(config.head_dim)
                is_gated = len(query) == 2 * config.num_attention_heads // groups * config.head_dim
                rows += [*heads[::2], *heads[1::2]] if is_gated else heads
                rows += [key, value]
            found[f"self_attention.linear_qkv.{end}"] = torch.cat(rows)
    if "self_attn.o_proj.weight" in own:
        found["self_attention.linear_qkv.layer_norm_weight"] = own.pop("input_layernorm.weight")
        found["self_attention.linear_proj.weight"] = own.pop("self_attn.o_proj.weight")
        for one in "qk":
            if f"self_attn.{one}_norm.weight" in own:
                found[f"self_attention.{one}_layernorm.weight"] = own.pop(f"self_attn.{one}_norm.weight")
    norm = "pre_mlp_layernorm.weight" if "mlp.gate.weight" in own else "mlp.linear_fc1.layer_norm_weight"
    found[norm] = own.pop("post_attention_layernorm.weight")
    for theirs, ours in (("mlp", "mlp"), ("mlp.shared_experts", "mlp.shared_expert")):
        if f"{ours}.down_proj.weight" in own:
            gate, up = own.pop(f"{ours}.gate_proj.weight"), own.pop(f"{ours}.up_proj.weight")
            found[f"{theirs}.linear_fc1.weight"] = torch.cat([gate, up])
            found[f"{theirs}.linear_fc2.weight"] = own.pop(f"{ours}.down_proj.weight")
    for theirs, ours in (
        ("mlp.router.weight", "mlp.gate.weight"),
        ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
        ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj"),
        ("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj"),
    ):
        if ours in own:
            found[theirs] = own.pop(ours)
    return found | {f"self_attention.{name}": one for name, one in own.items()}  # slime's linear attention


def save(stored: dict[str, Any], directory: Path) -> Path:
    """Write a directory as Megatron does, and return it."""
    dcp.save(stored, checkpoint_id=directory / "iter_0000012", no_dist=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("12\n")
    return directory


def read(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 300, 7)[None]).logits
    return found


def within(directory: Path) -> Path:
    found = megatron_checkpoint(directory)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "stacked", "more"),
    [
        ("Qwen3ForCausalLM", True, {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", False, {"tie_word_embeddings": False}),
        ("Qwen2ForCausalLM", True, {}),
        ("LlamaForCausalLM", True, {"num_key_value_heads": 4}),
        ("Qwen3MoeForCausalLM", True, MOE),
        ("Qwen3_5MoeForCausalLM", False, DELTA_NET | MOE | {"shared_expert_intermediate_size": 24}),
    ],
)
def test_the_logits_are_those_of_the_model(name: str, stacked: bool, more: dict[str, object], tmp_path: Path) -> None:
    directory = make_architecture(name, tmp_path, **more)
    model = read(directory)
    if name == "Qwen2ForCausalLM":
        assert model.model.layers[0].self_attn.q_proj.bias is not None
    checkpoint = within(save(as_megatron(model, stacked), tmp_path / "torch_dist"))
    settings = model_files.read_settings(directory)
    assert why_another_model(checkpoint, settings) is None
    assert torch.equal(logits(load(checkpoint, settings).eval()), logits(model))


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored.pop(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("decoder.layers.mlp.linear_fc2.weight"), r"nothing of it is model.layers.0.mlp.down_proj.weight \(2"),
        (_with("decoder.layers.mlp.router.weight", 2, 4, 32), "decoder.layers.mlp.router.weight would be .*no paramet"),
        (
            _with("decoder.layers.0.mlp.linear_fc1.weight", 98, 32),
            r"decoder.layers.0.mlp.linear_fc1.weight .*\(48, 32\)",
        ),
        (
            _with("decoder.layers.self_attention.linear_qkv.weight", 2, 60, 32),
            "linear_qkv.weight would be .*no paramet",
        ),
        (_with("decoder.layers.mlp.linear_fc2.weight"), r"layers.mlp.linear_fc2.weight .*\(\), which is no parameter"),
        (_with("decoder.layers.0.mlp.linear_fc1.weight"), r"0.mlp.linear_fc1.weight .*\(\), which is no parameter"),
        (_with("decoder.layers.mlp.linear_fc1.weight", 2), r"gate_proj.weight with shape \(\), which is \(48, 32\)"),
        (_with("decoder.layers.self_attention.linear_qkv.weight", 2), r"qkv.weight .*\(\), which is no parameter"),
        (_with("decoder.layers.0.mlp.linear_fc1.weight", 1, 32), r"gate_proj.weight with shape \(1, 32\)"),
        (_with(f"decoder.layers.{'9' * 5000}.mlp.linear_fc2.weight", 1), "which is no parameter there"),
        (_with("output_layer.weight", 384, 32), "output_layer.weight would be lm_head.weight"),
        (_with("embedding.word_embeddings.weight", 300, 32), r"\(300, 32\), which is \(320, 32\) there"),
    ],
)
def test_names_that_are_left_over_or_missing_are_named(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    directory = make_architecture("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=True)
    stored = as_megatron(read(directory), stacked=True)
    change(stored)
    place = save(stored, tmp_path / "torch_dist")
    values = {"datasets": [{"path": "x"}], "model": str(directory), "sampling": {"max_context_tokens": 64}}
    values["sampling"]["max_response_tokens"] = 16
    config = RunConfig.model_validate(values | {"loss": {"reference_kl": 0.1, "reference_model": str(place)}})
    with pytest.raises(ConfigError, match=words) as found:
        LearnerModels(config).require_trainable()
    assert "Qwen3ForCausalLM" in str(found.value) and "convert_torch_dist_to_hf.py" in str(found.value)
    with pytest.raises(ValueError, match=words):
        load(within(place), model_files.read_settings(directory))
    with pytest.raises(ConfigError, match="`torch_dist` checkpoint converted"):
        require_model(place)


class _Call:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_the_pickle_of_its_metadata_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that are not torch's, such as Megatron's, are not looked up; a pickle of something else is refused."""
    directory = make_architecture("Qwen3ForCausalLM", tmp_path)
    model = read(directory)
    checkpoint = within(save(as_megatron(model, stacked=True), tmp_path / "torch_dist"))
    monkeypatch.chdir(tmp_path)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = [_Call(), json.JSONDecodeError("no class of torch's", "", 0)]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    settings = model_files.read_settings(directory)
    assert torch.equal(logits(load(checkpoint, settings).eval()), logits(model))
    assert not (tmp_path / "executed").exists()
    for content in (b"", pickle.dumps(_Call()), pickle.dumps({"state_dict_metadata": {}})):
        (checkpoint / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata is no metadata of torch.distributed.checkpoint"):
            load(checkpoint, settings)
    assert not (tmp_path / "executed").exists()


def _setting_attributes(target: Any, state: Any) -> bytes:
    """Return a pickle that sets attributes of a class or function that it names."""
    return pickle.PROTO + b"\x02" + pickle.dumps(target, 2)[2:-1] + pickle.dumps(state, 2)[2:-1] + b"b."


def test_the_pickle_of_its_metadata_changes_nothing(tmp_path: Path) -> None:
    order = TensorStorageMetadata.__init__
    memory = TensorProperties().__getstate__()[3]
    settings = AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8)
    for content in (
        _setting_attributes(TensorStorageMetadata, {"__init__": OrderedDict}),
        _setting_attributes(TensorStorageMetadata, (None, {"__init__": OrderedDict})),
        _setting_attributes(torch.serialization._get_layout, (None, {"__kwdefaults__": {"name": "x"}})),
        _setting_attributes(memory, (None, {"_value_": 7})),
        _setting_attributes(json.JSONDecodeError, {"reached": True}),
        pickle.dumps(Metadata),
    ):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata is no metadata .*(it sets attributes of|AssertionError)"):
            load(tmp_path, settings)
    assert Metadata.storage_meta is None
    assert TensorStorageMetadata.__init__ is order and memory.value == 0
    assert torch.serialization._get_layout.__kwdefaults__ is None


def _first_file(found: Any, name: str) -> None:
    next(iter(found.storage_data.values())).relative_path = name


def _first_tensor(found: Any, **values: Any) -> None:
    vars(found.state_dict_metadata["decoder.final_layernorm.weight"]).update(values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: vars(found).clear(),
        lambda found: found.state_dict_metadata.update({1: found.state_dict_metadata.popitem()[1]}),
        lambda found: _first_tensor(found, size=None),
        lambda found: _first_tensor(found, size=torch.Size([-1])),
        lambda found: _first_tensor(found, properties=None),
        lambda found: vars(found).update(storage_data=None),
        lambda found: _first_file(found, "../../x.distcp"),
        lambda found: _first_file(found, "/etc/x.distcp"),
        lambda found: _first_file(found, ".."),
        lambda found: _first_file(found, None),
    ],
)
def test_damaged_metadata_is_refused_by_name(damage: Callable[[Any], None], tmp_path: Path) -> None:
    directory = make_architecture("Qwen3ForCausalLM", tmp_path)
    checkpoint = within(save(as_megatron(read(directory), stacked=True), tmp_path / "torch_dist"))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    damage(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    settings = model_files.read_settings(directory)
    with pytest.raises(ValueError, match=rf"{checkpoint}/\.metadata is no metadata of torch"):
        load(checkpoint, settings)
    assert f"{checkpoint}" in str(why_another_model(checkpoint, settings))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    directory = make_architecture("Qwen3ForCausalLM", tmp_path)
    checkpoint = within(save(as_megatron(read(directory), stacked=True), tmp_path / "torch_dist"))
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(OSError, match=r"could not be read .*__0_0\.distcp"):
        load(checkpoint, model_files.read_settings(directory))
