"""Load a policy onto the ranks: shards first, then weights, then a check of its logprobs and gradients on the device.

    config -> model without memory -> sharded -> memory -> weights from rank 0, one parameter at a time -> check

Only rank 0 reads the files, in their own dtype and into its machine's memory; a rank's device never holds more than its
shards and one whole parameter.

Shape legend: T = tokens of a chain, M = predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from training import attention, delta_net, expert_parallel, lora, model_files, router_replay
from training.packing import Packing
from training.policy_model import ForwardWork, TrainablePolicy, choose_packing, pair_cost
from training.prefix_tree import Segment
from training.rank_zero import read_on_rank_zero

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import RunConfig
    from ratchet.config_sections import TrainingConfig

_FORK, _CHAIN_TOKENS, _BRANCH_TOKENS = 12, 24, 3


class _Tolerance(NamedTuple):
    """Largest mean difference of logprobs, in nats or, if that is less, in units of their spread; and largest relative
    error of the gradient.

    In bfloat16 two right ways to compute a chain differ by rounding: by 0.02 of the gradient for the tests' models. A
    backward pass that loses what branches owe to their prefix differs by 0.3. A mixture of experts may route a token
    otherwise.
    """

    logprobs: float
    gradient: float


_FLOAT32 = _Tolerance(1e-3, 1e-2)
_BFLOAT16 = _Tolerance(0.1, 0.1)
_BFLOAT16_EXPERTS = _Tolerance(0.1, 0.25)


class LoadedPolicy(NamedTuple):
    """A sharded policy, the packing of its bins, the count of its FLOPs, and the cost of one pair (`pair_cost`)."""

    policy: TrainablePolicy
    packing: Packing
    work: ForwardWork
    pair_cost: float


def load_policy(path: Path, config: RunConfig, device: torch.device) -> LoadedPolicy:
    """Load a policy with float32 master weights, sharded over all ranks. A collective.

    With LoRA the adapters are new and in float32, and the frozen base is in the dtype that is computed in.

    Raises ValueError, on every rank, if the files cannot be read, if an adapter's target is not in the model, if the
    architecture cannot be packed as wanted or its routing not be replayed, or if logprobs or gradients of a forked
    batch differ from those of the model's own logits on each chain alone.
    """
    transformers_logging.disable_progress_bar()
    training = config.training
    settings = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    packing = choose_packing(training.packing, model)
    on_gpu = device.type == "cuda"
    if on_gpu if training.activation_checkpointing is None else training.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TrainablePolicy(model, training.fp32_head)
    if training.router_replay:
        policy.routers = router_replay.install(model)
    work = ForwardWork.of(policy, is_frozen=training.lora is not None)
    cost = pair_cost(policy)
    dtype = compute_dtype(training.dtype, device)
    if training.lora is not None:
        lora.add_adapters(model, training.lora, dtype)
    _shard(policy, make_mesh(device, training.shard_ranks), dtype, training)
    policy.to_empty(device=device)
    _fill(policy, _load_on_rank_zero(path, policy), device, config.seed)
    rounded = _BFLOAT16_EXPERTS if getattr(model.config, "num_experts_per_tok", None) else _BFLOAT16
    _check(policy, packing, path, device, _FLOAT32 if dtype == torch.float32 else rounded)
    return LoadedPolicy(policy, packing, work, cost)


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


def _load_on_rank_zero(path: Path, policy: TrainablePolicy) -> Any:
    """Return the model in its files' dtype on rank 0, None elsewhere. A collective; its errors are every rank's."""
    model = None

    def load() -> None:
        nonlocal model
        model = model_files.load_causal_lm(path, "auto")
        _require_same_tensors(model, policy)

    try:
        read_on_rank_zero(load)
    except OSError as error:  # also of the files' format
        raise ValueError(f"{path}: the model cannot be loaded: {error}") from None
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


# ---------------------------------------------------------------- check


def _check(policy: TrainablePolicy, packing: Packing, path: Path, device: torch.device, bounds: _Tolerance) -> None:
    """Compare a forked batch with its chains alone, and switch the policy to segments in between. A collective.

    It runs on the device, in the dtype and with the sharding of training, since a kernel can be wrong in one of them
    only; layers are also computed again in the backward pass, but in padded rows, whose architectures may have dropout.
    Raises ValueError, on every rank, if they differ by more than `bounds`.
    """
    policy.train(packing != "padded")
    chain = torch.arange(_CHAIN_TOKENS, device=device)
    branch = torch.cat([chain[:_FORK], torch.arange(_BRANCH_TOKENS, device=device)])
    targets = torch.cat([chain[1:], branch[_FORK:]])
    expected = _scores_and_gradient(policy, lambda: _plain_scores(policy, chain, branch))
    if packing != "padded":
        attention.register_segment_attention()
        policy.model.set_attn_implementation(attention.NAME)
        delta_net.fork_states(policy.model)
    one_pass = _padded_scores if packing == "padded" else _forest_scores
    found = _scores_and_gradient(policy, lambda: one_pass(policy, chain, branch, targets))
    spread = expected.logprobs.std().clamp(max=1.0)
    gap = ((found.logprobs - expected.logprobs).abs().mean() / spread).nan_to_num(torch.inf).double()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    squares = torch.stack([
        torch.stack([(one - other).square().sum(), other.square().sum()])
        for one, other in zip(found.gradient, expected.gradient, strict=True)
    ]).sum(0, dtype=torch.float64)  # fmt: skip
    dist.all_reduce(squares)
    relative = float((squares[0] / squares[1]).sqrt())
    if not float(gap) <= bounds.logprobs:
        raise ValueError(
            f"{path}: this architecture changes its logits after the output embedding, or mixes tokens in an unknown "
            f"way (logprobs differ by {float(gap):.2g} nats on average); it cannot be trained here"
        )
    if not relative <= bounds.gradient:
        remedy = "it cannot be trained on this device" if packing == "padded" else "use training.packing: padded on it"
        raise ValueError(
            f"{path}: on {device.type} the gradient of a batch differs from that of its chains alone "
            f"(relative error {relative:.2g}); {remedy}"
        )


class _Scores(NamedTuple):
    """Logprobs (M,), and the gradient of a weighted sum of them: this rank's shards of what is trained."""

    logprobs: Tensor
    gradient: list[Tensor]


def _scores_and_gradient(policy: TrainablePolicy, score: Callable[[], Tensor]) -> _Scores:
    logprobs_M = score()
    weights_M = torch.linspace(-1.0, 2.0, len(logprobs_M), device=logprobs_M.device)
    torch.autograd.backward((logprobs_M * weights_M).sum())
    gradient = [_local_gradient(parameter) for parameter in policy.parameters() if parameter.requires_grad]
    policy.zero_grad(set_to_none=True)
    return _Scores(logprobs_M.detach(), gradient)


def _local_gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else torch.zeros_like(parameter.to_local())


def _plain_scores(policy: TrainablePolicy, chain: Tensor, branch: Tensor) -> Tensor:
    return torch.cat([policy.plain_logprobs(chain), policy.plain_logprobs(branch)[_FORK - 1 :]])


def _padded_scores(policy: TrainablePolicy, chain: Tensor, branch: Tensor, targets: Tensor) -> Tensor:
    rows = torch.stack([chain, torch.nn.functional.pad(branch, (0, len(chain) - len(branch)))])
    in_branch = len(chain) + torch.arange(_FORK - 1, len(branch) - 1, device=chain.device)
    sources = torch.cat([torch.arange(len(chain) - 1, device=chain.device), in_branch])
    return policy(rows, None, None, sources, targets, 1.0).logprobs  # type: ignore[no-any-return]


def _forest_scores(policy: TrainablePolicy, chain: Tensor, branch: Tensor, targets: Tensor) -> Tensor:
    fork, end, branch_end = _FORK, _CHAIN_TOKENS, _CHAIN_TOKENS + _BRANCH_TOKENS
    segments = [
        Segment(0, fork, branch_end, 0, -1),
        Segment(fork, end, end, fork, 0),
        Segment(end, branch_end, branch_end, fork, 0),
    ]
    numbers = torch.arange(branch_end, device=chain.device)
    positions = torch.where(numbers < end, numbers, numbers - end + fork)
    sources = torch.cat([numbers[: end - 1], numbers[fork - 1 : fork], numbers[end : branch_end - 1]])
    ids = torch.cat([chain, branch[fork:]])
    return policy(ids[None], positions[None], segments, sources, targets, 1.0).logprobs  # type: ignore[no-any-return]
