"""Expert parallelism: ranks divide the experts of each layer among them, and tokens travel to their experts.

transformers does it, by its plan of the model: an all-to-all sends each token to the ranks of its experts and another
one brings the results back. Every rank keeps bins of its own and computes everything but the experts for them alone.
FSDP2 shards a rank's experts further, over the ranks that hold the same ones.

    8 ranks, expert_parallel 4: ranks 0 to 3 divide all experts among them, and so do ranks 4 to 7;
                                ranks 0 and 4 hold the same quarter, each a half of it
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ratchet.errors import BugError

EXPERT_PARALLEL_ARCHITECTURES = frozenset({"Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM"})
"""Architectures whose experts can be divided; each is tested for gradients equal to those of one rank."""
_DISPATCH = "ep_dispatch_experts"
"""transformers' style by which tokens travel; its other styles need ranks that have the same tokens."""


def why_no_expert_parallel(model: Any, num_ranks: int, ranks_of_copy: int | None = None) -> str | None:
    """Return why the experts of this model of transformers cannot be divided among so many ranks; None if they can.

    `ranks_of_copy`: the ranks of one copy of the weights, None if they are not known yet.
    """
    name = type(model).__name__
    if not getattr(model.config, "num_experts_per_tok", None):
        return f"{name} has no experts"
    if name not in EXPERT_PARALLEL_ARCHITECTURES:
        known = ", ".join(sorted(EXPERT_PARALLEL_ARCHITECTURES))
        return f"{name} is not registered for expert parallelism (registered: {known})"
    settings = model.config
    if settings.num_experts % num_ranks:
        return f"{num_ranks} does not divide the number of experts, {settings.num_experts}"
    if ranks_of_copy is None:
        return None
    if ranks_of_copy % num_ranks:
        return f"{num_ranks} does not divide the ranks that hold a copy of the weights, {ranks_of_copy}"
    num_shards = ranks_of_copy // num_ranks
    sizes = (2 * settings.moe_intermediate_size, settings.hidden_size)
    if any(size % num_shards for size in sizes):
        return (
            f"{num_shards} ranks would hold the same experts, which cannot shard {sizes[0]} and {sizes[1]} rows evenly"
        )
    return None


def shard_experts(
    model: Any, device_type: str, num_ranks: int, shard_ranks: int | None, precision: MixedPrecisionPolicy
) -> None:
    """Divide the experts of each layer among `num_ranks` ranks, and shard them by FSDP2 over the others of a copy.

    Call it before FSDP2 shards the rest of the layers. `shard_ranks`: ranks of one copy of the weights, None means all.
    Raises ValueError if the ranks or the experts cannot be divided so.
    """
    world_size = dist.get_world_size()
    ranks_of_copy = shard_ranks or world_size
    if (reason := why_no_expert_parallel(model, num_ranks, ranks_of_copy)) is not None:
        raise ValueError(f"training.expert_parallel: {reason}; use another number, or leave it out")
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    if _DISPATCH not in model.ep_plan.values():
        raise BugError(f"transformers' plan of {type(model).__name__} has no {_DISPATCH}: {model.ep_plan}")
    sizes = (world_size // ranks_of_copy, ranks_of_copy // num_ranks, num_ranks)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "expert"))
    apply_expert_parallelism(model, mesh["expert"], None, model.ep_plan)
    same_experts = mesh["shard"] if sizes[0] == 1 else mesh["replicate", "shard"]
    for layer in model.get_decoder().layers:
        experts: Any = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue  # a dense layer
        if not all(isinstance(one, DTensor) for one in experts.parameters()):
            raise BugError("transformers' plan leaves a parameter of experts whole; its gradient would be wrong")
        # By rows, since a rank may hold fewer experts than there are ranks with the same ones.
        fully_shard(experts, mesh=same_experts, mp_policy=precision, shard_placement_fn=lambda _: Shard(1))
        # The backward all-to-all has summed the gradients over the ranks that divide the experts; FSDP2 averages
        # those of all other parameters over all ranks.
        experts.set_gradient_divide_factor(float(world_size))
        if sizes[1] > 1:  # gloo cannot divide; with one rank, torch 2.13 would divide twice
            experts.set_force_sum_reduction_for_comms(True)
