"""The model of a directory that is trained, and the names of its tensors in the directory's files.

A model that reads images is published as a class that wraps a text model, such as Qwen3_5MoeForConditionalGeneration.
transformers' AutoModelForCausalLM loads the text model of it alone: its layers and its head are trained. All other
tensors of the files (the vision tower, layers that predict several tokens) are published as they are.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from engine import policy_files
from training import lora


def read_settings(path: Path) -> Any:
    """Return transformers' settings of a model directory. Raises ValueError or OSError if they cannot be read.

    Code of the directory (`auto_map`) is not run, and transformers does not ask for it at a terminal.
    """
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except OSError:
        raise
    except ValueError as error:
        config, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
        if "auto_map" not in config or config.get("model_type") in CONFIG_MAPPING:
            raise
        text = (
            f"config.json of {path} needs code of its own (auto_map), which is not run: transformers has no such class"
        )
        raise ValueError(text) from error
    except Exception as error:  # transformers reads the fields as they come: any of them may have another type
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def wraps_text_model(settings: Any, model: Any) -> bool:
    """Return whether `settings`, those of a directory, are of a class that wraps `model`."""
    return type(settings) is not type(model.config)


def load_causal_lm(path: Path, dtype: torch.dtype | str) -> Any:
    """Load the model of a directory that is trained. Raises ValueError if a tensor of it is not in the files.

    transformers would give a missing tensor random values.
    """
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
    except RuntimeError:  # an expert's tensor may be missing, which is not named
        with contextlib.suppress(OSError):  # there is no file of the usual name
            _require(_missing_parts(path))
        raise
    _require(_names(model, {name: model.get_parameter_or_buffer(name) for name in loaded["missing_keys"]}))
    untouched_names(model, path)
    return model


def _require(missing: set[str]) -> None:
    if missing:
        raise ValueError(f"no file has the tensor {min(missing)} ({len(missing)} such); download the model again")


def _missing_parts(path: Path) -> set[str]:
    """Return which tensors of single experts the files lack, if they store experts one by one."""
    settings = read_settings(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    wraps = wraps_text_model(settings, model)
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in conversions if isinstance(one, PrefixChange) and wraps]
    model._weight_conversions = renamings
    whole = _names(model, dict(model.named_parameters()))
    model._weight_conversions = renamings + [one for one in conversions if not isinstance(one, PrefixChange)]
    parts = _names(model, dict(model.named_parameters())) - whole
    stored = policy_files.tensor_files(path).keys()
    return parts - stored if parts & stored else set()


def keep_names(model: Any, source: Any) -> None:
    """Publish `model` under the names of the files that `source`, of the same class, was loaded from."""
    model._weight_conversions = source._weight_conversions


def as_in_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the model under the names, and in the parts, of the files that it was loaded from.

    A text model has other names in the files of the class that wraps it, and experts may be stored one by one.
    """
    if not getattr(model, "_weight_conversions", None):
        return dict(tensors)
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def adapter_as_in_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `lora.adapter_tensors` under the names that they have in the files' class."""
    own = {name.removeprefix(lora.PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    return {lora.PEFT_PREFIX + name: tensor for name, tensor in as_in_files(model, own).items()}


def untouched_names(model: Any, path: Path) -> list[str]:
    """Return the tensors of a directory's files that are not of `model`, the text model that was loaded from it.

    Returns [] if the directory's class does not wrap it. Raises ValueError if the files have other names for the
    model's tensors than those that it would be published under.
    """
    settings = read_settings(path)
    if not wraps_text_model(settings, model):
        return []
    stored = policy_files.tensor_files(path).keys()
    if unknown := sorted(_names(model, dict(model.named_parameters())) - stored):
        raise ValueError(
            f"the text model's tensors would be published under other names than those of the files, "
            f"which have no {unknown[0]} ({len(unknown)} such)"
        )
    return sorted(stored - _names(model, model.state_dict()))  # the state has tied tensors, too


def _names(model: Any, tensors: Mapping[str, Tensor]) -> set[str]:
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    return set(as_in_files(model, shapes))
