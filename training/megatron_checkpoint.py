"""The weights of a distributed checkpoint of Megatron-core (`torch_dist`), as a model of transformers.

Only the tensors of its `.distcp` files are read, and of `.metadata`, a pickle, only torch's own records: no other class
or function that it names is looked up, and none is changed. Sizes come from transformers' settings, not from the
arguments in `common.pt`.

    layers      one tensor per layer, or one of all layers with the layer as first axis
    linear_qkv  per query group: its queries, the queries' gates if there are any, one key, one value
    linear_fc1  the gate's rows, then those of the up projection
    experts     the expert as first axis of a layer
"""

import dataclasses
import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.serialization import _get_layout
from transformers import AutoModelForCausalLM

from training.checkpoint import as_os_error
from training.policy_model import head_size

_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.experts.experts.linear_fc1.weight": ["mlp.experts.gate_up_proj"],
    "mlp.experts.experts.linear_fc2.weight": ["mlp.experts.down_proj"],
    "mlp.shared_experts.gate_weight": ["mlp.shared_expert_gate.weight"],
    "mlp.shared_experts.linear_fc1.weight": ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
    "mlp.shared_experts.linear_fc2.weight": ["mlp.shared_expert.down_proj.weight"],
}
"""Megatron-core's name in a layer -> those of transformers; of two, each has half of the rows."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,9})\.)?(.+)")
_NOT_WEIGHTS = re.compile(r"optimizer|_extra_state|^mtp\.")
"""Also layers that predict several tokens, which transformers has not."""
_FILE = re.compile(r"[^/]+\.distcp")
_OF_METADATA = (one for one in vars(metadata).values() if getattr(one, "__module__", "") == metadata.__name__)
_RECORDS = {
    (one.__module__, one.__qualname__): one
    for one in (*_OF_METADATA, filesystem._StorageInfo, torch.Size, OrderedDict, _get_layout)
}
"""The classes and the function in a pickle of `.metadata`, by module and name."""


class _Part(NamedTuple):
    """A parameter of transformers' model, and the name of the stored tensor that it is a part of."""

    stored: str
    name: str
    tensor: Tensor


def load(checkpoint: Path, settings: Any) -> Any:
    """Load a model of transformers' `settings`. Raises ValueError or OSError if that is another, or cannot be read."""
    model, reader = _meta_model(settings), _Reader(checkpoint)
    _require_same(checkpoint, _parts(reader.tensors("meta"), model.config), model)
    stored = reader.tensors("cpu")
    with warnings.catch_warnings(action="ignore"), as_os_error(OSError, "read"):  # DCP warns without a process group
        state_dict_loader.load(stored, storage_reader=reader, no_dist=True)
    weights = {part.name: part.tensor for part in _parts(stored, model.config)}
    dtype = weights["model.embed_tokens.weight"].dtype
    return type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=dtype)


def why_another_model(checkpoint: Path, settings: Any) -> str | None:
    """Return why these are not the weights of a model of `settings`, None if they are. Reads `.metadata` alone."""
    try:
        model = _meta_model(settings)
        _require_same(checkpoint, _parts(_Reader(checkpoint).tensors("meta"), model.config), model)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _meta_model(settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


class _Reader(filesystem.FileSystemReader):
    """Torch's reader of the `.distcp` files of one directory, which unpickles torch's own records alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read `.metadata`. Raises ValueError if it is no record of torch's."""
        path = Path(self.path) / ".metadata"
        content = io.BytesIO(path.read_bytes())
        try:
            found: metadata.Metadata = _Records(content).load()
            assert isinstance(found, metadata.Metadata)
            found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
            for stored in found.storage_data.values():
                if not _FILE.fullmatch(stored.relative_path):
                    raise ValueError(f"a tensor is in {stored.relative_path!r:.60}, which is no file of the directory")
            _empty_tensors(found, "meta")
            return found
        except Exception as error:  # a pickle may fail in any way
            raise ValueError(f"{path} is no metadata of torch.distributed.checkpoint: {error!r}") from None

    def tensors(self, device: str) -> dict[str, Tensor]:
        """Return empty tensors of the model's stored ones; the optimiser's and Megatron's extra states are left out."""
        return _empty_tensors(self.read_metadata(), device)


def _empty_tensors(of: metadata.Metadata, device: str) -> dict[str, Tensor]:
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype, device=device)
        for name, one in of.state_dict_metadata.items()
        if not _NOT_WEIGHTS.search(name) and isinstance(one, metadata.TensorStorageMetadata)
    }


class _Records(pickle._Unpickler):  # the one in C has no `load_build`
    """Unpickles `.metadata`. A class or function that is not torch's record becomes an empty stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else _RECORDS.get((module, name), _Other)

    def load_build(self: Any) -> None:
        """Set the attributes of a new record. Raises UnpicklingError for a class or another object of the process."""
        target = self.stack[-2]
        is_record = dataclasses.is_dataclass(target) or isinstance(target, (_Other, OrderedDict))
        if isinstance(target, type) or not is_record:
            raise pickle.UnpicklingError(f"it sets attributes of {target!r:.60}")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


class _Other:
    """Stands for an object of another class, such as Megatron's, which the tensors do not need."""

    def __init__(self, *values: object) -> None:
        pass


def _require_same(checkpoint: Path, parts: Iterable[_Part], model: Any) -> None:
    """Raise ValueError if these are not the model's parameters, or have other shapes."""
    wanted = {name: tuple(one.shape) for name, one in model.named_parameters()}
    found = {part.name: part for part in parts}
    others = [part for part in found.values() if wanted.get(part.name) != tuple(part.tensor.shape)]
    if others:
        part = others[0]
        reason = f"{part.stored} would be {part.name} with shape {tuple(part.tensor.shape)}, which is "
        reason += f"{wanted[part.name]} there" if part.name in wanted else "no parameter there"
    elif missing := sorted(wanted.keys() - found.keys()):
        reason = f"nothing of it is {missing[0]} ({len(missing)} such)"
    else:
        return
    raise ValueError(
        f"{checkpoint} is no checkpoint of a {type(model).__name__} of this config: {reason}; convert it with vime's "
        "tools/convert_torch_dist_to_hf.py (--input-dir, --output-dir, --origin-hf-dir) and name the result"
    )


def _parts(stored: Mapping[str, Tensor], config: Any) -> Iterator[_Part]:
    """Yield the parameters of transformers' model. A name that is unknown stays."""
    for name, tensor in stored.items():
        if name in _OUTSIDE:
            yield _Part(name, _OUTSIDE[name], tensor[: config.vocab_size] if tensor.dim() == 2 else tensor)
        elif (match := _LAYER.fullmatch(name)) is None or tensor.dim() == 0:
            yield _Part(name, name, tensor)
        else:
            number, kind = match.groups()
            for layer, one in enumerate(tensor) if number is None else [(int(number), tensor)]:
                for own, part in _split(kind, one, config):
                    yield _Part(name, f"model.layers.{layer}.{own}", part)


def _split(kind: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of transformers' layer that a tensor of Megatron-core's layer has."""
    attention, _, end = kind.rpartition(".")
    if attention == "self_attention.linear_qkv" and tensor.dim() and (parts := _queries_keys_values(tensor, config)):
        yield from ((f"self_attn.{name}_proj.{end}", part) for name, part in zip("qkv", parts, strict=True))
    else:  # slime keeps transformers' own modules in Megatron-core's attention, with their names
        names = _IN_LAYER.get(kind, [kind.removeprefix("self_attention.")])
        yield from zip(names, tensor.tensor_split(len(names)) if tensor.dim() else [tensor] * len(names), strict=True)


def _queries_keys_values(tensor: Tensor, config: Any) -> list[Tensor]:
    """Return the rows of all queries, keys and values, [] if they are of another number.

    In transformers a gate follows its query, in Megatron-core all queries of its group.
    """
    groups, size = config.num_key_value_heads, head_size(config)
    of_group = config.num_attention_heads // groups
    num_heads = len(tensor) // groups // size
    if num_heads not in (of_group + 2, 2 * of_group + 2) or len(tensor) != groups * num_heads * size:
        return []
    heads = tensor.reshape(groups, num_heads, size, *tensor.shape[1:])
    queries, keys, values = torch.split(heads, [num_heads - 2, 1, 1], 1)
    ordered = (queries.reshape(groups, -1, of_group, *heads.shape[2:]).transpose(1, 2), keys, values)
    return [part.reshape(-1, *tensor.shape[1:]) for part in ordered]
