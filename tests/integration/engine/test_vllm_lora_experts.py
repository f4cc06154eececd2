"""vLLM's own classes, changed by `leave_out_experts` in a process of their own: importing them takes ten seconds.

A whole vLLM with adapters and experts is in `test_vllm_experts.py`.
"""

import json
import subprocess
import sys

PROGRAM = """
import json

from dataclasses import replace

import torch
from engine.vllm_lora_experts import leave_out_experts

leave_out_experts()

from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.lora import model_manager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.linear import LinearBase


def bare(kind):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


found = {}
targets = {"all": None, "attention": ["q_proj"], "experts": ["experts"], "a part of them": ["experts.0.gate_proj"]}
for name, modules in targets.items():
    config = VllmConfig()
    config.lora_config = LoRAConfig(target_modules=modules)
    with set_current_vllm_config(config):
        experts = FusedMoEConfig(
            num_experts=4, experts_per_token=2, hidden_dim=8, intermediate_size=16, num_local_experts=4,
            num_logical_experts=4, activation=MoEActivation.SILU, device="cpu", in_dtype=torch.float32,
            routing_method=RoutingMethodType.Renormalize, moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            is_lora_enabled=True,
        )
    assert replace(experts).is_lora_enabled == experts.is_lora_enabled, "outside of a config, too"
    assert experts.intermediate_size_per_partition == 16, "vLLM's own values are made, too"
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.q_proj, model.mlp.experts, model.mlp.shared_expert_gate = bare(LinearBase), bare(MoERunner), bare(LinearBase)
    model.mlp.shared_expert = torch.nn.Module()
    model.mlp.shared_expert.expert_gate = model.mlp.shared_expert_gate
    model.mlp.experts.moe_config = experts
    found[name] = [experts.is_lora_enabled, model_manager.get_supported_lora_modules(model)]
experts.is_lora_enabled = False
experts.moe_parallel_config.sp_size = 2
try:
    model_manager.get_supported_lora_modules(model)
except ValueError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def test_experts_have_no_slots_unless_vllm_is_told_so() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    linear = ["expert_gate", "q_proj", "shared_expert_gate"]
    assert found["all"] == found["attention"] == [False, linear]
    assert found["experts"] == found["a part of them"] == [True, sorted([*linear, "experts"])]
    assert "leave --enable-expert-parallel out" in found["refused"]
