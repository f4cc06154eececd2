"""Estimate what a learner's rank and an engine hold in memory, and what a rank sends, from a model's sizes; nothing is
loaded.

An estimate, not a measurement: allocators add a tenth or so, and kernels need room of their own.
"""

import torch

from training.model_facts import ModelSizes
from training.policy_model import chunk_logits

_GIB = 2**30
_MASTER_BYTES = 16
"""Bytes per weight in float32: master weight, gradient and AdamW's two moments."""
_LAYER_ACTIVATIONS = 16
"""Values of size tokens x hidden in one layer that is computed again in the backward pass, without its feed-forward
block."""


def learner_gib(
    sizes: ModelSizes,
    num_ranks: int,
    bin_tokens: int,
    frozen_weights: int = 0,
    expert_parallel: int = 1,
    adapter_weights: int = 0,
) -> float:
    """Return the GiB of one rank on a GPU: bfloat16, activation checkpointing, sharded over `num_ranks`, of which
    `expert_parallel` divide the experts of a layer and send them tokens.

    `frozen_weights`: number of weights of the reference and the teacher together, which are float32, too. With
    `adapter_weights`, the number in the adapters, the other weights are frozen in bfloat16.
    """
    trained = adapter_weights or sizes.weights
    frozen = sizes.weights if adapter_weights else 0
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


def pass_bytes(
    sizes: ModelSizes,
    num_ranks: int,
    ranks_of_copy: int,
    frozen_weights: int = 0,
    expert_parallel: int = 1,
    adapter_weights: int = 0,
) -> float:
    """Return the bytes of weights and gradients that a rank sends while every rank computes one bin, by collectives in
    rings. Parameters as of `learner_gib`; `ranks_of_copy`: those that a copy of the weights is sharded over.

    Layers are gathered in bfloat16 forward and backward, the rest and frozen models once; gradients are reduced in
    float32. Tokens that ranks send each other (expert and sequence parallelism) are not counted.
    """
    experts = sizes.layers * sizes.layer_experts if expert_parallel > 1 else 0
    shared, others = sizes.weights - experts, 1 - 1 / ranks_of_copy
    own = experts * (1 / expert_parallel - 1 / ranks_of_copy)  # to the ranks that hold the same experts
    gathered = 2 * ((2 * (shared + adapter_weights) - sizes.outside + frozen_weights) * others + 2 * own)
    reduced = 4 * (adapter_weights * others if adapter_weights else shared * others + own)
    among_copies = 2 * 4 * (adapter_weights or sizes.weights) * (1 / ranks_of_copy - 1 / num_ranks)
    return gathered + reduced + among_copies


def publish_bytes(sizes: ModelSizes, ranks_of_copy: int, adapter_weights: int = 0) -> float:
    """Return the bytes that a rank sends to gather the weights, or adapters, of one version, in their own dtype."""
    return (4 * adapter_weights or 2 * sizes.weights) * (1 - 1 / ranks_of_copy)


def engine_gib(sizes: ModelSizes, num_gpus: int, cached_tokens: int) -> float:
    """Return the GiB of one GPU of an engine: weights in bfloat16 and the cache of so many tokens, over `num_gpus`."""
    return (2 * sizes.served + cached_tokens * sizes.cache_bytes) / num_gpus / _GIB
