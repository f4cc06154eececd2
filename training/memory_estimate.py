"""Estimate what a learner's rank and an engine hold in memory, from a model's config alone; nothing is loaded.

An estimate, not a measurement: allocators add a tenth or so, and kernels need room of their own.

Shape legend: L = layers, H = hidden size, V = vocabulary, T = tokens of a bin.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    chunk_logits,
    head_size,
    positions_limit,
    why_no_segments,
    why_quantised,
)
from training.sequence_parallel import why_no_sequence_parallel

_GIB = 2**30
_MASTER_BYTES = 16
"""Bytes per weight in float32: master weight, gradient and AdamW's two moments."""
_LAYER_ACTIVATIONS = 16
"""Values of size T x H in one layer that is computed again in the backward pass, without its feed-forward block."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes and abilities of a model, read from its directory.

    `weights`: number in the text model, tied ones once. `served`: `weights` and those of a vision tower.
    `adapter_weights`: number in the adapters that were asked for. `active`: weights that a token passes. `cache_bytes`:
    size of one token's keys and values in an engine, in bfloat16. `quantised`: why these weights cannot be trained,
    None if they can. `no_segments`: why chains cannot share prefixes in training, None if they can. `positions`: the
    longest chain in training, None without such a limit. `layer_experts`: weights of the experts of the largest layer;
    `chosen`: experts that a token passes; both 0 without experts. `expert_bytes`: size of one token's recorded experts.
    `no_replay`: why the experts cannot be replayed. `undivided`: why the weights cannot be divided among the ranks that
    were asked for. `no_slices`: why so many ranks cannot share a bin.
    """

    architecture: str
    weights: int
    served: int
    adapter_weights: int
    active: int
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
    undivided: str | None
    no_slices: str | None


def read_sizes(
    path: Path,
    adapters: LoraConfig | None = None,
    expert_parallel: int = 1,
    ranks_of_copy: int | None = None,
    sequence_parallel: int = 1,
) -> ModelSizes:
    """Read a model's sizes. Raises ValueError or OSError if transformers makes no causal language model of the
    directory, if the model's form is none that is trained here, or if it lacks a layer that `adapters` name.
    """
    settings = model_files.read_settings(path)
    try:
        return _sizes(settings, adapters, expert_parallel, ranks_of_copy, sequence_parallel)
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers computes with the fields as they come, such as 0 heads
        raise ValueError(f"a model of this form cannot be trained here: {type(error).__name__}: {error}") from error


def _sizes(
    settings: Any, adapters: LoraConfig | None, expert_parallel: int, ranks_of_copy: int | None, sequence_parallel: int
) -> ModelSizes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    policy = TrainablePolicy(model)
    layers = [dict(layer.named_parameters()) for layer in model.get_decoder().layers]
    largest = max(layers, key=_num_weights)
    text: Any = model.config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    experts = getattr(text, "num_experts_per_tok", None) or 0
    intermediate = experts * getattr(text, "moe_intermediate_size", 0) if experts else text.intermediate_size
    weights = sum(one.numel() for one in policy.parameters())
    no_segments = why_no_segments(model)
    sizes = ModelSizes(
        architecture=(settings.architectures or ["unknown"])[0],
        weights=weights,
        served=_served(settings) if model_files.wraps_text_model(settings, model) else weights,
        adapter_weights=0,
        active=active_weights(policy),
        largest_layer=_num_weights(largest),
        layer_experts=_num_weights({name: one for name, one in largest.items() if ".experts." in name}),
        chosen=experts,
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=intermediate,
        vocabulary=text.vocab_size,
        cache_bytes=2 * 2 * attention_layers(text) * heads * head_size(text),
        quantised=why_quantised(settings),
        no_segments=no_segments,
        positions=positions_limit(text),
        has_vision=hasattr(settings, "vision_config"),
        expert_bytes=router_replay.bytes_per_token(model),
        no_replay=router_replay.why_no_replay(model),
        undivided=why_no_expert_parallel(model, expert_parallel, ranks_of_copy),
        no_slices=no_segments or why_no_sequence_parallel(model, sequence_parallel),
    )
    if adapters is None:
        return sizes
    lora.add_adapters(model, adapters)
    return replace(sizes, adapter_weights=sum(one.numel() for one in model.parameters() if one.requires_grad))


def _num_weights(parameters: Mapping[str, Tensor]) -> int:
    return sum(one.numel() for one in parameters.values())


def _served(settings: Any) -> int:
    """Return the weights of the class that wraps a text model."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    return sum(one.numel() for one in model.parameters())


def learner_gib(
    sizes: ModelSizes, num_ranks: int, bin_tokens: int, frozen_weights: int = 0, expert_parallel: int = 1
) -> float:
    """Return the GiB of one rank on a GPU: bfloat16, activation checkpointing, sharded over `num_ranks`, of which
    `expert_parallel` divide the experts of a layer and send them tokens.

    `frozen_weights`: number of weights of the reference and the teacher together, which are float32, too. With
    adapters the other weights are frozen in bfloat16.
    """
    trained = sizes.adapter_weights or sizes.weights
    frozen = sizes.weights if sizes.adapter_weights else 0
    held = (_MASTER_BYTES * trained + 2 * frozen + 4 * frozen_weights) / num_ranks
    divided = 1 if frozen_weights else expert_parallel  # the frozen models gather whole layers
    layer = sizes.largest_layer - sizes.layer_experts + sizes.layer_experts / divided
    gathered = 2 * 2 * layer + 2 * 2 * sizes.vocabulary * sizes.hidden  # one layer ahead; embedding, head
    sent = 2 * 2 * bin_tokens * sizes.chosen * sizes.hidden if expert_parallel > 1 else 0  # and received
    kept = 2 * sizes.layers * bin_tokens * sizes.hidden
    recomputed = 2 * bin_tokens * (_LAYER_ACTIVATIONS * sizes.hidden + 4 * sizes.intermediate)
    logits = 3 * 4 * min(chunk_logits(torch.device("cuda")), bin_tokens * sizes.vocabulary)
    head_gradient = 0 if frozen else 4 * sizes.vocabulary * sizes.hidden
    return (held + gathered + sent + kept + recomputed + logits + head_gradient) / _GIB


def engine_gib(sizes: ModelSizes, num_gpus: int, cached_tokens: int) -> float:
    """Return the GiB of one GPU of an engine: weights in bfloat16 and the cache of so many tokens, over `num_gpus`."""
    return (2 * sizes.served + cached_tokens * sizes.cache_bytes) / num_gpus / _GIB
