"""vLLM's LoRA leaves out experts, since adapters are of linear layers only here (`training/lora.py`).

With `--enable-lora` vLLM 0.32 gives every expert room for adapters, and runs experts by a kernel that adds them. For
rank 16 and 128 experts in 48 layers (Qwen3-30B-A3B) that is 1.7 GB per LoRA slot. On a CPU the first call ends vLLM,
because that kernel needs a Triton with a CPU back end, and PyPI has none.

Experts have room, as vLLM gives it, if `--lora-target-modules` names them.
"""

from typing import Any

_EXPERTS = "experts"
"""A part of the name of every layer of experts and of its parts."""


def leave_out_experts() -> None:
    """Change vLLM in this process, before it makes the model."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.lora import model_manager
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    make_config, supported = FusedMoEConfig.__post_init__, model_manager.get_supported_lora_modules

    def without_lora(self: Any) -> None:
        config = get_current_vllm_config_or_none()
        if self.is_lora_enabled and config is not None and config.lora_config is not None:
            self.is_lora_enabled = any(_EXPERTS in one for one in config.lora_config.target_modules or ())
        make_config(self)

    FusedMoEConfig.__post_init__ = without_lora
    model_manager.get_supported_lora_modules = lambda model: _with_other_names(model, supported(model))


def _with_other_names(model: Any, supported: list[str]) -> list[str]:
    """Return the names of layers that get adapters: those of vLLM without experts, and every name of a linear layer.

    A layer may have two, such as the gate of a shared expert, and vLLM computes by the second. It gives an adapter to
    the first and replaces the second by the same layer only if it knows that name, too.

    Raises ValueError if vLLM would give layers beside the experts the adapters of other tokens.
    """
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase

    left_out, others = set(), set()
    for name, module in model.named_modules(remove_duplicate=False):
        last = name.rpartition(".")[2]
        if isinstance(module, LinearBase):
            others.add(last)
        elif isinstance(module, MoERunner) and not module.moe_config.is_lora_enabled:
            left_out.add(last)
            if module.moe_config.moe_parallel_config.is_sequence_parallel:
                raise ValueError(
                    "--enable-lora with --enable-expert-parallel, tensor and data parallelism: each rank has a part of "
                    "the tokens and the adapters of all; leave --enable-expert-parallel out of engine.args"
                )
    return sorted((set(supported) | others) - left_out)
