"""Liger's fused kernels (the package liger-kernel) for norms, rotary positions and gated MLPs, on a GPU.

transformers computes a norm in six operations, each of which reads and writes all hidden states; Liger's kernels read
them once. Attention, the output layer and experts are not Liger's: they are our own or transformers'.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

_PATCHES = "liger_kernel.transformers.monkey_patch"
_COMPARED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Types of model whose logprobs and gradients with these kernels were compared with their own on a GPU. Liger has
kernels for more; a type is added here once it was compared."""
_OUTPUT_LAYER_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Options that keep Liger from replacing the output layer, whose logits are never computed as a whole here."""


def are_used(wanted: bool | None, model: Any, device: torch.device) -> bool:
    """Return whether a model gets fused kernels. `wanted`: `training.fused_kernels`.

    Raises ValueError if they are wanted and cannot be had.
    """
    reason = None if wanted is False else why_not(model, device)
    if wanted and reason is not None:
        raise ValueError(f"training.fused_kernels: true cannot be had: {reason}; leave it out")
    return wanted is not False and reason is None


def why_not(model: Any, device: torch.device) -> str | None:
    """Return why a model has no fused kernels on a device, or None if it has."""
    if device.type != "cuda":
        return f"the device is a {device.type}, and the kernels are for GPUs"
    if (kind := model.config.model_type) not in _COMPARED_TYPES:
        return f"models of type {kind!r} were not tried with them"
    if (activation := getattr(model.config, "hidden_act", "silu")) not in ("silu", "swish"):
        return f"its MLPs have the activation {activation}, and the kernels compute silu"
    try:
        import_module(_PATCHES)
    except (ImportError, RuntimeError) as error:
        return f"the package liger-kernel cannot be imported ({error})"
    return None


def fuse_layers(model: Any) -> None:
    """Give fused kernels to the layers of a model that exists, sharded or not; they change no parameter.

    The experts of a mixture keep their own code, which recorded routes and expert parallelism rely on. Liger puts its
    classes into transformers' module, too; they are taken out again, so that a model which is loaded later is
    transformers' own until it gets them. The function for rotary positions is the module's and stays.
    """
    module = sys.modules[type(model).__module__]
    own = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    has_experts = getattr(model.config, "num_experts_per_tok", None) is not None
    apply = import_module(_PATCHES).MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    apply(model=model, rope=True, rms_norm=True, swiglu=not has_experts, **_OUTPUT_LAYER_OFF)
    vars(module).update(own)
