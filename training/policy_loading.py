"""Load a policy onto the ranks: shards first, then weights, then a check of its logprobs and gradients on the device.

    config -> model without memory -> sharded -> memory -> weights from rank 0, one parameter at a time -> check

Only rank 0 reads the files, in their own dtype and into its machine's memory; a rank's device never holds more than its
shards and one whole parameter.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from training import expert_parallel, fused_kernels, lora, megatron_checkpoint, model_files, router_replay
from training.attention_blocks import OWN_CALL_FROM_PAIRS
from training.attention_check import Heads, why_no_own_calls
from training.packing import Packing, PassCost, pack_bin
from training.plan_types import TrainingSequence
from training.policy_check import switch_and_check
from training.policy_inputs import make_inputs
from training.policy_model import ForwardWork, TrainablePolicy, choose_packing, head_size, pair_cost, why_no_training
from training.rank_zero import read_on_rank_zero
from training.sequence_parallel import SequenceRanks, make_sequence_ranks, why_no_sequence_parallel

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import RunConfig
    from ratchet.config_sections import TrainingConfig


class LoadedPolicy(NamedTuple):
    """A sharded policy, the packing of its bins, the count of its FLOPs, and the cost of passes without launches."""

    policy: TrainablePolicy
    packing: Packing
    work: ForwardWork
    cost: PassCost


def load_policy(
    path: Path,
    config: RunConfig,
    device: torch.device,
    ranks: SequenceRanks | None = None,
    checkpoint: Path | None = None,
) -> LoadedPolicy:
    """Load a policy with float32 master weights, sharded over all ranks. A collective.

    `ranks`: those that share a bin with this one, if a model that was loaded before has them already. `checkpoint`:
    Megatron-core's, which has the weights of the model that `path` describes. With LoRA the adapters are new and in
    float32, and the frozen base is in the dtype that is computed in.

    Raises ValueError, on every rank, if the files cannot be read, if an adapter's target is not in the model, if the
    architecture cannot be packed as wanted, its routing not be replayed or its bins not be shared, or if logprobs or
    gradients of a forked batch differ from those of the model's own logits on each chain alone.
    """
    transformers_logging.disable_progress_bar()
    training = config.training
    settings = model_files.read_settings(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    packing = choose_packing(training.packing, model)
    if (reason := why_no_training(settings, config.sampling.max_context_tokens)) is not None:
        raise ValueError(f"{path}: {reason}")
    on_gpu = device.type == "cuda"
    if on_gpu if training.activation_checkpointing is None else training.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TrainablePolicy(model, training.fp32_head)
    if (size := training.sequence_parallel) > 1:
        unfit = f"{packing} bins have no segments" if packing == "padded" else why_no_sequence_parallel(model, size)
        if unfit is not None:
            raise ValueError(f"training.sequence_parallel: {unfit}; use another number, or leave it out")
    policy.sequence_ranks = ranks or make_sequence_ranks(training.sequence_parallel)
    dtype = compute_dtype(training.dtype, device)
    if on_gpu and packing != "padded" and dtype.itemsize == 2:
        policy.own_call_from_pairs = _own_call_from_pairs(model, training.sequence_parallel, dtype, device)
    if training.router_replay:
        policy.routers = router_replay.install(model)
    work = ForwardWork.of(policy, is_frozen=training.lora is not None)
    cost = PassCost(pair_cost(policy))
    if training.lora is not None:
        lora.add_adapters(model, training.lora, dtype)
    _shard(policy, make_mesh(device, training.shard_ranks), dtype, training)
    policy.to_empty(device=device)
    _fill(policy, _load_on_rank_zero(path, policy, checkpoint), device, config.seed)
    fused = fused_kernels.are_used(training.fused_kernels, model, device)
    switch_and_check(policy, packing, path, config.sampling.max_context_tokens, device, dtype, fused)
    return LoadedPolicy(policy, packing, work, cost)


def measure_cost(loaded: LoadedPolicy, chain_tokens: int, bin_tokens: int, device: torch.device) -> PassCost:
    """Measure passes of a loaded policy on this device, of the slowest rank, so that all get the same. A collective.

    A short chain, and one that forks at some depths, take the host's time. A full bin takes the device's, or the host's
    if that is longer; then fewer tokens save nothing.
    """
    depths = 4
    nested = [[0] * 16 * depth + [1] * 16 for depth in range(depths + 1, 0, -1)]
    length = min(chain_tokens, bin_tokens)
    full = [[number] * length for number in range(bin_tokens // length)]
    seconds = torch.tensor([_pass_seconds(loaded.policy, bin, device) for bin in (nested[:1], nested, full)]).to(device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    short, forked, whole = seconds.tolist()
    unit = whole / (len(full) * length * (1 + loaded.cost.pair * length / 2))
    return PassCost(loaded.cost.pair, short / unit, max(0.0, forked - short) / depths / unit)


def _pass_seconds(policy: TrainablePolicy, chains: Sequence[Sequence[int]], device: torch.device) -> float:
    """Return the shorter time of two forward and backward passes over these chains, after one that loads kernels."""
    bin = pack_bin([TrainingSequence.of_ids(ids) for ids in chains], "tree")
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        policy(make_inputs(bin, device, policy.sequence_ranks), 1.0).logprobs.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    policy.zero_grad(set_to_none=True)
    return min(seconds[1:])


def _own_call_from_pairs(model: Any, num_ranks: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Return from which size on blocks of attention have kernels of their own: none have them if those are wrong.

    `num_ranks` share a bin, each with some of the heads.
    """
    settings = model.config
    keys = max(settings.num_key_value_heads, num_ranks)
    heads = Heads(settings.num_attention_heads // num_ranks, keys // num_ranks, head_size(settings))
    reason = why_no_own_calls(heads, dtype, device, side_by_side=num_ranks > 1)
    if reason is not None:
        warnings.warn(f"large blocks of attention use the kernels of small ones, since {reason}", stacklevel=2)
    return OWN_CALL_FROM_PAIRS if reason is None else None


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `training.dtype`."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, wanted)
    return found


def make_mesh(device: torch.device, shard_ranks: int | None) -> DeviceMesh:
    """Return a mesh of all ranks: one copy of the weights, or one per `shard_ranks` ranks.

    Raises ValueError if the number of ranks is not a multiple of `shard_ranks`.
    """
    world_size = dist.get_world_size()
    if shard_ranks is None or shard_ranks == world_size:
        return init_device_mesh(device.type, (world_size,))
    if world_size % shard_ranks:
        raise ValueError(
            f"training.shard_ranks: {shard_ranks} does not divide the number of ranks, {world_size}; "
            "use the number of GPUs of one node, or leave it out"
        )
    return init_device_mesh(
        device.type, (world_size // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard")
    )


def _shard(policy: TrainablePolicy, mesh: DeviceMesh, dtype: torch.dtype, training: TrainingConfig) -> None:
    """Shard by FSDP2 over the mesh, also with one rank, so that there is one code path, and divide experts.

    Computes in `dtype` and reduces gradients in float32.
    """
    precision = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    if training.expert_parallel > 1:
        expert_parallel.shard_experts(
            policy.model, mesh.device_type, training.expert_parallel, training.shard_ranks, precision
        )
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    register_fsdp_forward_method(policy, "plain_logprobs")


def _load_on_rank_zero(path: Path, policy: TrainablePolicy, checkpoint: Path | None) -> Any:
    """Return the model in its files' dtype on rank 0, None elsewhere. A collective; its errors are every rank's."""
    model = None

    def load() -> None:
        nonlocal model
        if checkpoint is None:
            model = model_files.load_causal_lm(path, "auto")
        else:
            model = megatron_checkpoint.load(checkpoint, model_files.read_settings(path))
        _require_same_tensors(model, policy)

    try:
        read_on_rank_zero(load)
    except OSError as error:  # also of the files' format
        raise ValueError(f"{checkpoint or path}: the model cannot be loaded: {error}") from None
    return model


def _require_same_tensors(source: Any, policy: TrainablePolicy) -> None:
    """Raise ValueError if the model that was read has other parameters than the one that the config describes."""
    read = {name: tuple(one.shape) for name, one in source.named_parameters()}
    wanted = {
        lora.base_name(name): tuple(one.shape)
        for name, one in policy.model.named_parameters()
        if not lora.is_adapter_parameter(name)
    }
    if read != wanted:
        name = sorted(read.items() ^ wanted.items())[0][0]
        raise ValueError(f"{name} has shape {read.get(name)} in the files and {wanted.get(name)} by the config")


def _fill(policy: TrainablePolicy, source: Any, device: torch.device, seed: int) -> None:
    """Copy parameters and buffers of rank 0's model into the ranks' shards, and begin adapters. A collective."""
    parameters = {} if source is None else dict(source.named_parameters())
    buffers = {} if source is None else dict(source.named_buffers())
    if source is not None:
        model_files.keep_names(policy.model, source)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if lora.is_adapter_parameter(name):
                whole.copy_(lora.first_value(name, parameter.shape, seed))
            elif source is not None:
                whole.copy_(parameters[lora.base_name(name)])
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(part.to_local())
        for name, buffer in policy.model.named_buffers():
            if source is not None:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, src=0)
