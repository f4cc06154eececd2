"""Describe a run before it starts: which part is on which GPU, and the memory of each.

Everything here is computed from the config; nothing is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from ratchet.config import RunConfig
from ratchet.model_directory import frozen_models, model_of
from stack.learner_models import LearnerModels
from stack.placement import LEARNER, PlacedEngine, Placement, cache_gpus
from training.memory_estimate import engine_gib, learner_gib, pass_bytes, publish_bytes
from training.model_facts import ModelSizes
from training.policy_inputs import slice_length
from training.service import default_workers

_WIDTH = 80


@dataclass(slots=True, frozen=True)
class _Memory:
    """The inputs of memory estimates: the policy's sizes, the weights of adapters, those of reference and teacher."""

    sizes: ModelSizes
    adapter_weights: int
    frozen_weights: int


def describe_run(models: LearnerModels, placement: Placement, num_gpus: Mapping[str, int]) -> list[str]:
    """Return lines of at most 80 characters. `num_gpus`: node -> number of its GPUs, as far as it is known."""
    config = models.config
    memory = _read_memory(models)
    lines = [*_node_lines(config, placement, num_gpus, memory)]
    lines += _shared_lines(config, placement, memory)
    if memory is not None:
        lines.append("GiB are estimates: an engine with the cache of one longest call, to which vLLM")
        lines.append("adds cache; a rank with its part of training.bin_tokens in bfloat16")
        lines += _traffic_lines(config, placement, memory)
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _node_lines(
    config: RunConfig, placement: Placement, num_gpus: Mapping[str, int], memory: _Memory | None
) -> list[str]:
    engines = {engine.name: engine for engine in placement.engines}
    lines: list[str] = []
    shown = ""
    for row in placement.rows():
        if row.node != shown:
            shown = row.node
            known = num_gpus.get(row.node)
            count = "" if known is None else f" ({known} GPUs)"
            lines.append(f"node {row.node}{count}")
        where = "-" if row.gpu is None else f"GPU {row.gpu}"
        engine = engines.get(row.part)
        words = (engine and engine.address) or ""
        if row.gpu is not None and memory is not None:
            words = f"{_estimate(config, memory, engine):6.1f} GiB"
        elif row.gpu is None and row.part == LEARNER:
            num_ranks = default_workers(config)
            words = f"{num_ranks} rank{'' if num_ranks == 1 else 's'} on CPU"
        lines.append(f"  {where:<8}{row.part:<14}{words}"[:_WIDTH].rstrip())
    lines += _unused_lines(placement, num_gpus)
    return lines


def _shared_lines(config: RunConfig, placement: Placement, memory: _Memory | None) -> list[str]:
    """Return how engines and learner divide the memory of GPUs that they share, and the smallest GPU for that."""
    share, rest = placement.engine_share, placement.rank_share
    lines = [f"of a shared GPU an engine has {share:.0%} of the memory, a rank {rest:.0%}"] if share else []
    if share and memory is not None:
        engine = max(_estimate(config, memory, engine) for engine in placement.engines)
        least = max(engine / share, _estimate(config, memory, None) / rest)
        lines.append(f"  by these estimates a GPU has at least {least:.0f} GiB")
    return lines


def _traffic_lines(config: RunConfig, placement: Placement, memory: _Memory) -> list[str]:
    """Return what a rank sends if every rollout fills its context and shares nothing; [] for ranks on CPU."""
    training, num_ranks = config.training, default_workers(config)
    if not placement.learner:
        return []
    of_copy = training.shard_ranks or num_ranks
    extra = (memory.frozen_weights, training.expert_parallel, memory.adapter_weights)
    sent = pass_bytes(memory.sizes, num_ranks, of_copy, *extra)
    published = publish_bytes(memory.sizes, of_copy, memory.adapter_weights)
    tokens = training.groups_per_step * training.group_size * config.sampling.max_context_tokens
    passes = ceil(tokens / training.bin_tokens / num_ranks * training.sequence_parallel)
    version = 4 * memory.adapter_weights or 2 * memory.sizes.weights
    return [
        f"a rank sends {_gib(sent)} GiB of weights and gradients for a bin of each rank, at most",
        f"  {_gib(passes * sent + published)} GiB a step (bins: {passes}; to publish: {_gib(published)} GiB),",
        f"  and engines get {_gib(version * len(placement.engines))} GiB of weights a step ({_gib(version)} each)",
    ]


def _unused_lines(placement: Placement, num_gpus: Mapping[str, int]) -> list[str]:
    used = {(row.node, row.gpu) for row in placement.rows()}
    unused = {node: [gpu for gpu in range(number) if (node, gpu) not in used] for node, number in num_gpus.items()}
    return [f"unused: {len(gpus)} GPUs of {node}, from {gpus[0]} on" for node, gpus in unused.items() if gpus]


def _estimate(config: RunConfig, memory: _Memory, engine: PlacedEngine | None) -> float:
    if engine is None:
        training = config.training
        return learner_gib(
            memory.sizes,
            default_workers(config),
            slice_length(training.bin_tokens, training.sequence_parallel),
            memory.frozen_weights,
            training.expert_parallel,
            memory.adapter_weights,
        )
    gpus = cache_gpus([*config.engine.args, *engine.args])
    return engine_gib(memory.sizes, gpus, config.sampling.max_context_tokens)


def _read_memory(models: LearnerModels) -> _Memory | None:
    """Return None if the policy is not made yet, or transformers does not know it, or it lacks an adapter's layer.

    A reference or teacher that cannot be read counts as the policy.
    """
    config = models.config
    policy = model_of(config)
    try:
        sizes, adapters = models.facts(policy).sizes, config.training.lora
        adapter_weights = 0 if adapters is None else models.facts(policy).adapter_weights(adapters)
    except (OSError, ValueError):
        return None
    frozen = sum(_num_weights(models, model or policy, sizes.weights) for model in frozen_models(config))
    return _Memory(sizes, adapter_weights, frozen)


def _num_weights(models: LearnerModels, model: Path, otherwise: int) -> int:
    try:
        return models.facts(model).sizes.weights
    except (OSError, ValueError):
        return otherwise
