"""Compare a loaded policy with the model's own logits and gradients, and switch it to the code that trains it.

The check runs on the device, in the dtype and with the sharding of training, since a kernel can be wrong in one of them
only.

Shape legend: T = tokens of a chain, M = predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training import attention, delta_net, fused_kernels
from training.packing import Packing
from training.policy_inputs import Tokens, make_inputs
from training.policy_model import TrainablePolicy
from training.prefix_tree import Segment


class Tolerance(NamedTuple):
    """Largest mean difference of logprobs, in nats or, if that is less, in units of their spread; and largest relative
    error of the gradient.

    In bfloat16 two right ways to compute a chain differ by rounding: by 0.02 of the gradient for the tests' models. A
    backward pass that loses what branches owe to their prefix differs by 0.3. A mixture of experts may route a token
    otherwise.
    """

    logprobs: float
    gradient: float


FLOAT32 = Tolerance(1e-3, 1e-2)
BFLOAT16 = Tolerance(0.1, 0.1)
BFLOAT16_EXPERTS = Tolerance(0.1, 0.25)


class _Fork(NamedTuple):
    """A chain, and a branch that leaves it after `fork` tokens: the ids of each, (T,)."""

    chain: Tensor
    branch: Tensor
    fork: int

    @classmethod
    def of(cls, fork: int, chain_tokens: int, branch_tokens: int, device: torch.device) -> _Fork:
        """Make one of so many tokens; the branch has `branch_tokens` of its own."""
        chain = torch.arange(chain_tokens, device=device)
        return cls(chain, torch.cat([chain[:fork], torch.arange(branch_tokens, device=device)]), fork)

    @property
    def targets(self) -> Tensor:
        """The predicted tokens, (M,): those of the chain, then the branch's own."""
        return torch.cat([self.chain[1:], self.branch[self.fork :]])


def switch_and_check(
    policy: TrainablePolicy, packing: Packing, path: Path, device: torch.device, bounds: Tolerance, fused: bool
) -> None:
    """Compare a forked batch with its chains alone. A collective. In between, the policy is switched to segments, and
    to fused kernels if `fused`.

    Layers are also computed again in the backward pass, but in padded rows, whose architectures may have dropout.

    Raises ValueError, on every rank, if they differ by more than `bounds`.
    """
    policy.train(packing != "padded")
    fork = _Fork.of(12, 24, 3, device)
    expected = _scores_and_gradient(policy, lambda: _plain_scores(policy, fork))
    if packing != "padded":
        attention.register_segment_attention()
        policy.model.set_attn_implementation(attention.NAME)
        delta_net.fork_states(policy.model)
    if fused:
        fused_kernels.fuse_layers(policy.model)
    one_pass = _padded_scores if packing == "padded" else _forest_scores
    found = _scores_and_gradient(policy, lambda: one_pass(policy, fork))
    spread = expected.logprobs.std().clamp(max=1.0)
    gap = ((found.logprobs - expected.logprobs).abs().mean() / spread).nan_to_num(torch.inf).double()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    squares = torch.stack([
        torch.stack([(one - other).square().sum(), other.square().sum()])
        for one, other in zip(found.gradient, expected.gradient, strict=True)
    ]).sum(0, dtype=torch.float64)  # fmt: skip
    dist.all_reduce(squares)
    relative = float((squares[0] / squares[1]).sqrt())
    without_fused = "; see whether training.fused_kernels: false mends it" if fused else ""
    if not float(gap) <= bounds.logprobs:
        raise ValueError(
            f"{path}: this architecture changes its logits after the output embedding, or mixes tokens in an unknown "
            f"way (logprobs differ by {float(gap):.2g} nats on average); it cannot be trained here{without_fused}"
        )
    if not relative <= bounds.gradient:
        remedy = "it cannot be trained on this device" if packing == "padded" else "use training.packing: padded on it"
        raise ValueError(
            f"{path}: on {device.type} the gradient of a batch differs from that of its chains alone "
            f"(relative error {relative:.2g}); {remedy}{without_fused}"
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


def _plain_scores(policy: TrainablePolicy, batch: _Fork) -> Tensor:
    return torch.cat([policy.plain_logprobs(batch.chain), policy.plain_logprobs(batch.branch)[batch.fork - 1 :]])


def _padded_scores(policy: TrainablePolicy, batch: _Fork) -> Tensor:
    chain, branch, fork = batch
    rows = torch.stack([chain, torch.nn.functional.pad(branch, (0, len(chain) - len(branch)))])
    in_branch = len(chain) + torch.arange(fork - 1, len(branch) - 1)
    sources = torch.cat([torch.arange(len(chain) - 1), in_branch])
    return _scores(policy, batch, Tokens(_array(rows), None, None, _array(sources), _array(batch.targets)))


def _forest_scores(policy: TrainablePolicy, batch: _Fork) -> Tensor:
    chain, branch, fork = batch
    end, branch_end = len(chain), len(chain) + len(branch) - fork
    segments = [
        Segment(0, fork, branch_end, 0, -1),
        Segment(fork, end, end, fork, 0),
        Segment(end, branch_end, branch_end, fork, 0),
    ]
    numbers = np.arange(branch_end)
    positions = np.where(numbers < end, numbers, numbers - end + fork)
    sources = np.concatenate([numbers[: end - 1], numbers[fork - 1 : fork], numbers[end : branch_end - 1]])
    ids = _array(torch.cat([chain, branch[fork:]]))
    return _scores(policy, batch, Tokens(ids[None], positions[None], segments, sources, _array(batch.targets)))


def _scores(policy: TrainablePolicy, batch: _Fork, tokens: Tokens) -> Tensor:
    found: Tensor = policy(make_inputs(tokens, batch.chain.device, policy.sequence_ranks), 1.0).logprobs
    return found


def _array(ids: Tensor) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = ids.cpu().numpy()
    return found
