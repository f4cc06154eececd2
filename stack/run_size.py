"""Describe a run before it starts: which part is on which GPU, the memory of each, and what it writes in a day.

Everything here is computed from the config; nothing is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.config import RunConfig
from ratchet.model_directory import frozen_models, model_of
from stack.learner_models import LearnerModels
from stack.placement import LEARNER, PlacedEngine, Placement, cache_gpus
from training.memory_estimate import engine_gib, learner_gib
from training.model_facts import ModelSizes
from training.policy_inputs import slice_length
from training.service import default_workers

_WIDTH = 80
_DAY_SECONDS = 86_400
_SECONDS, _CALLS, _ACTIVITIES = 600.0, 30, 9
"""Assumed of one rollout unless its limits are lower: its duration, its model calls and its activities, as in
docs/fleet.md."""
_HISTORY_BYTES = 23_000
"""The size of one activity in Temporal's histories."""
_TOKEN_BYTES = 12
"""The size of one token in the table of turns: its id and its logprob, uncompressed."""


@dataclass(slots=True, frozen=True)
class DailySize:
    """The data that a run writes in a day if all boxes are busy and every rollout fills its context."""

    rollouts: int
    turn_rows: int
    token_bytes: int
    history_bytes: int


def daily_size(config: RunConfig) -> DailySize:
    rollouts = int(config.sandbox.max_boxes * _DAY_SECONDS / _seconds(config))
    return DailySize(
        rollouts=rollouts,
        turn_rows=rollouts * _calls(config),
        token_bytes=rollouts * config.sampling.max_context_tokens * _TOKEN_BYTES,
        history_bytes=rollouts * _ACTIVITIES * _HISTORY_BYTES,
    )


def _seconds(config: RunConfig) -> float:
    return min(_SECONDS, config.limits.agent_seconds + config.limits.eval_seconds)


def _calls(config: RunConfig) -> int:
    return min(_CALLS, config.harness.max_turns or _CALLS)


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
    daily = daily_size(config)
    lines.append(
        f"a day, about: {daily.rollouts:,} rollouts ({config.sandbox.max_boxes} boxes, {_seconds(config):.0f} s each),"
    )
    lines.append(
        f"  {daily.turn_rows:,} turn rows ({_calls(config)} calls each), {_gib(daily.token_bytes)} GiB of tokens,"
    )
    lines.append(f"  {_gib(daily.history_bytes)} GiB of Temporal histories")
    if config.training.router_replay and memory is not None:
        per_token = memory.sizes.expert_bytes
        size = daily.rollouts * config.sampling.max_context_tokens * per_token
        lines.append(f"  {_gib(size)} GiB of routed experts ({per_token} bytes per token), until trained")
    return lines


def _gib(size: int) -> str:
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
