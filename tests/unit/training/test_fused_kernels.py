"""The models that get fused kernels; nothing else of a model or of transformers is changed."""

import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from training import fused_kernels
from training.policy_model import SEGMENT_ARCHITECTURES

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def own_rotary_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers its own function back after each test: Liger's runs on a GPU only."""
    for module in (modeling_qwen3, modeling_qwen3_moe):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


def make(name: str = "Qwen3") -> torch.nn.Module:
    with torch.device("meta"):
        if name == "Qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SMALL))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS))


def test_a_gpu_gets_them_without_being_asked_and_a_cpu_never() -> None:
    assert fused_kernels.are_used(None, make(), GPU)
    assert not fused_kernels.are_used(False, make(), GPU)
    assert not fused_kernels.are_used(None, make(), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"training.fused_kernels: true cannot be had: the device is a cpu"):
        fused_kernels.are_used(True, make(), torch.device("cpu"))


def test_a_type_that_was_not_tried_goes_without() -> None:
    model = make()
    model.config.model_type = "qwen3_5"
    assert not fused_kernels.are_used(None, model, GPU)
    with pytest.raises(ValueError, match=r"models of type 'qwen3_5' were not tried with them; leave it out"):
        fused_kernels.are_used(True, model, GPU)


def test_mlps_with_another_activation_keep_their_own_code() -> None:
    model = make()
    model.config.hidden_act = "gelu"
    assert not fused_kernels.are_used(None, model, GPU)
    with pytest.raises(ValueError, match="its MLPs have the activation gelu, and the kernels compute silu"):
        fused_kernels.are_used(True, model, GPU)


def test_a_machine_without_the_package_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    assert not fused_kernels.are_used(None, make(), GPU)
    with pytest.raises(ValueError, match="the package liger-kernel cannot be imported"):
        fused_kernels.are_used(True, make(), GPU)


def test_every_type_that_was_tried_is_trained_here() -> None:
    names = {name.removesuffix("ForCausalLM").lower() for name in SEGMENT_ARCHITECTURES}
    assert {kind.replace("_", "") for kind in fused_kernels._COMPARED_TYPES} <= names


def replaced(model: torch.nn.Module) -> set[str]:
    """Return the classes of the modules whose forward is another one than their class's."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("name", "expected"), [("Qwen3", {"Qwen3RMSNorm", "Qwen3MLP"}), ("Qwen3-MoE", {"Qwen3MoeRMSNorm"})]
)
def test_norms_and_dense_mlps_are_replaced_and_nothing_else(name: str, expected: set[str]) -> None:
    model = make(name)
    before = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    fused_kernels.fuse_layers(model)
    assert replaced(model) == expected
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == before
    assert replaced(make(name)) == set(), "a model that is made later is transformers' own"


def test_transformers_keeps_its_classes() -> None:
    before = dict(vars(modeling_qwen3))
    fused_kernels.fuse_layers(make())
    changed = {name for name, value in vars(modeling_qwen3).items() if before.get(name) is not value}
    assert changed == {"apply_rotary_pos_emb"}
