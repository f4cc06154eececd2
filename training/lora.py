"""LoRA: adapters of `peft` in the policy, their first values, and their names in a PEFT directory.

The policy's own parameters are frozen; everything else of a step (packing, sharding, loss) is as without adapters.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ratchet.types import JsonObject

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import LoraConfig

_NAME = "default"
"""PEFT's name of the only adapter, which its files leave out."""
PEFT_PREFIX = "base_model.model."
"""The prefix of the names of the model's tensors in PEFT's files."""


def add_adapters(model: Any, lora: LoraConfig, base_dtype: torch.dtype | None = None) -> None:
    """Add adapters to a model in place, and freeze its own parameters, in `base_dtype` if one is given.

    A model without memory (`meta`) will do. Raises ValueError if a target names no linear layer of the model.
    """
    from peft import inject_adapter_in_model

    layers = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    if missing := sorted(set(lora.target_modules) - layers):
        raise ValueError(
            f"training.lora.target_modules: the model has no linear layer {', '.join(missing)}; "
            f"it has {', '.join(sorted(layers - {'lm_head'}))}"
        )
    inject_adapter_in_model(_peft_config(lora), model, adapter_name=_NAME)
    if base_dtype is None:
        return
    for name, parameter in model.named_parameters():
        if not is_adapter_parameter(name):  # no optimiser adds small updates to it
            parameter.data = parameter.data.to(base_dtype)


def _peft_config(lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return PeftConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM")


def peft_config(lora: LoraConfig, base: Path) -> JsonObject:
    """Return the contents of PEFT's adapter_config.json, equal in every process."""
    values = _peft_config(lora).to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
    found: JsonObject = json.loads(json.dumps(values, default=sorted))  # sets
    return found


def is_adapter_parameter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return the name that a parameter of the model has without adapters."""
    return name.replace(".base_layer.", ".")


def first_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the first value of an adapter's parameter: B is 0, and A uniform in ±1/sqrt(inputs), as peft begins.

    It depends on the name and the seed only, so that it is equal for any number of ranks.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(((zlib.crc32(name.encode()) << 31) ^ seed) & (2**63 - 1))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def adapter_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' tensors of a policy, in float32, under PEFT's names."""
    for name, tensor in state.items():
        if is_adapter_parameter(name):
            own_name = name.removeprefix("model.").replace(f".{_NAME}.", ".")
            yield PEFT_PREFIX + own_name, tensor.detach()


def describe(lora: LoraConfig, base_files: list[JsonObject]) -> str:
    """Return the settings and the base's digests as one line of JSON, equal if a checkpoint fits."""
    digests = sorted(file["sha256"] for file in base_files)
    return json.dumps(lora.model_dump() | {"base_sha256": digests}, sort_keys=True)
