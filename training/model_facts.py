"""Facts about a model directory that is trained: its sizes, and what its form allows.

They follow from the directory's config alone; no weights are read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ratchet.config import LoraConfig
from training import lora, model_files, router_replay
from training.expert_parallel import why_no_expert_parallel
from training.policy_model import (
    PositionsLimit,
    TrainablePolicy,
    active_weights,
    attention_layers,
    head_size,
    positions_limit,
    why_no_segments,
    why_no_training,
    why_quantised,
)
from training.sequence_parallel import why_no_sequence_parallel


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes and abilities of a model.

    `weights`: number in the text model, tied ones once. `served`: `weights` and those of a vision tower. `active`:
    weights that a token passes. `outside`: weights of no layer, such as the embedding.
    `cache_bytes`: size of one token's keys and values in an engine, in bfloat16.
    `quantised`: why these weights cannot be trained, None if they can. `no_segments`: why chains cannot share prefixes
    in training, None if they can. `positions`: the longest chain in training, None without such a limit.
    `layer_experts`: weights of the experts of the largest layer; `chosen`: experts that a token passes; both 0 without
    experts. `expert_bytes`: size of one token's recorded experts. `no_replay`: why the experts cannot be replayed.
    """

    architecture: str
    weights: int
    served: int
    active: int
    outside: int
    largest_layer: int
    layer_experts: int
    chosen: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache_bytes: int
    quantised: str | None
    no_segments: str | None
    positions: PositionsLimit | None
    has_vision: bool
    expert_bytes: int
    no_replay: str | None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model directory, whose config is read once. `settings`: transformers' of the directory.

    Each fact but those of `why_no_training` needs the model of the settings, without memory, which is made at the
    first such question. It raises ValueError or OSError if transformers makes no causal language model of the
    settings, or if the model's form is none that is trained here.
    """

    settings: Any

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a directory's config. Raises ValueError or OSError if transformers cannot."""
        return cls(model_files.read_settings(path))

    def why_no_training(self, num_tokens: int) -> str | None:
        """Return why the model cannot be trained with chains of up to `num_tokens`, None if it can."""
        try:
            return why_no_training(self.settings, num_tokens)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return f"its config.json cannot be used: {type(error).__name__}: {error}"

    def why_no_expert_parallel(self, num_ranks: int, ranks_of_copy: int) -> str | None:
        """Return why `num_ranks` ranks cannot divide the experts, None if they can."""
        with _known_form():
            return why_no_expert_parallel(self._model, num_ranks, ranks_of_copy)

    def why_no_sequence_parallel(self, num_ranks: int) -> str | None:
        """Return why `num_ranks` ranks cannot share a bin, None if they can."""
        with _known_form():
            return self.sizes.no_segments or why_no_sequence_parallel(self._model, num_ranks)

    def adapter_weights(self, adapters: LoraConfig) -> int:
        """Return the number of weights of these adapters. Raises ValueError if the model lacks a layer they name."""
        with _known_form():
            model = deepcopy(self._model)
            lora.add_adapters(model, adapters)
            return sum(one.numel() for one in model.parameters() if one.requires_grad)

    @cached_property
    def sizes(self) -> ModelSizes:
        with _known_form():
            return _sizes(self.settings, self._model)

    @cached_property
    def _model(self) -> Any:
        with _known_form(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.settings, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _known_form() -> Iterator[None]:
    """Raise ValueError for a config with whose fields transformers computes as they come, such as 0 heads."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"a model of this form cannot be trained here: {type(error).__name__}: {error}") from error


def _sizes(settings: Any, model: Any) -> ModelSizes:
    policy = TrainablePolicy(model)
    layers = [dict(layer.named_parameters()) for layer in model.get_decoder().layers]
    largest = max(layers, key=_num_weights)
    text: Any = model.config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    experts = getattr(text, "num_experts_per_tok", None) or 0
    intermediate = experts * getattr(text, "moe_intermediate_size", 0) if experts else text.intermediate_size
    weights = sum(one.numel() for one in policy.parameters())
    return ModelSizes(
        architecture=(settings.architectures or ["unknown"])[0],
        weights=weights,
        served=_served(settings) if model_files.wraps_text_model(settings, model) else weights,
        active=active_weights(policy),
        outside=weights - sum(map(_num_weights, layers)),
        largest_layer=_num_weights(largest),
        layer_experts=_num_weights({name: one for name, one in largest.items() if ".experts." in name}),
        chosen=experts,
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=intermediate,
        vocabulary=text.vocab_size,
        cache_bytes=2 * 2 * attention_layers(text) * heads * head_size(text),
        quantised=why_quantised(settings),
        no_segments=why_no_segments(model),
        positions=positions_limit(text),
        has_vision=hasattr(settings, "vision_config"),
        expert_bytes=router_replay.bytes_per_token(model),
        no_replay=router_replay.why_no_replay(model),
    )


def _num_weights(parameters: Mapping[str, Tensor]) -> int:
    return sum(one.numel() for one in parameters.values())


def _served(settings: Any) -> int:
    """Return the weights of the class that wraps a text model."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    return sum(one.numel() for one in model.parameters())
