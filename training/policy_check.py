"""Compare a loaded policy with the model's own logits and gradients, and switch it to the code that trains it.

The check runs on the device, in the dtype and with the sharding of training, since a kernel can be wrong in one of them
only.

Shape legend: T = tokens of a chain, M = predicted tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from engine import canary
from training import attention, delta_net, fused_kernels
from training.packing import Packing, pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import make_inputs
from training.policy_model import TrainablePolicy


class _Difference(NamedTuple):
    """Mean difference of logprobs, in nats or, if that is more, in units of their spread; and relative error of the
    gradient."""

    logprobs: float
    gradient: float


_FLOAT32 = _Difference(1e-3, 1e-2)
_BFLOAT16 = _Difference(0.1, 0.1)
_BFLOAT16_EXPERTS = _Difference(0.1, 0.25)
"""Bounds. Two right ways to compute a text differ by rounding: in bfloat16 by 0.03 nats and by 0.02 to 0.07 of the
gradient. A backward pass that loses what branches owe to their prefix differs by 0.3. A mixture of experts may route a
token otherwise."""
_MAX_ROUNDINGS = 2.0
"""The bound of a model that rounds more, in units of what its own two attention implementations differ by."""
_LARGEST = _Difference(0.5, 0.25)
"""Differences that rounding never excuses; beyond them a lost gradient of a branch would pass."""


def _forked_text(path: Path, num_vocabulary: int, max_tokens: int) -> list[TrainingSequence]:
    """Make a chain of the canary's text, without a tokenizer of ids that are spread over the vocabulary, and a branch
    that leaves the chain's third quarter out.

    A trained model rounds far more on ids that no text has, such as the first ones of its vocabulary.
    """
    has_tokenizer = (path / "tokenizer.json").is_file()
    spread = torch.linspace(0, num_vocabulary - 1, 48).long().tolist()
    ids = (canary.canary_ids(path) if has_tokenizer else spread)[:max_tokens]
    fork = len(ids) // 2
    return [TrainingSequence.of_ids(ids), TrainingSequence.of_ids(ids[:fork] + ids[fork + fork // 2 :], fork)]


def switch_and_check(
    policy: TrainablePolicy,
    packing: Packing,
    path: Path,
    max_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
) -> None:
    """Compare a forked batch with its chains alone, of at most `max_tokens`. A collective. In between, the policy is
    switched to segments, and to fused kernels if `fused`.

    Layers are also computed again in the backward pass, but in padded rows, whose architectures may have dropout.

    Raises ValueError, on every rank, if they differ by more than rounding.
    """
    policy.train(packing != "padded")
    chains = _forked_text(path, policy.model.config.vocab_size, max_tokens)
    expected = _scores_and_gradient(policy, lambda: _plain_scores(policy, chains, device))
    usual = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("eager")
    rounding = _difference(_scores_and_gradient(policy, lambda: _plain_scores(policy, chains, device)), expected)
    policy.model.set_attn_implementation(usual)
    if packing != "padded":
        AttentionInterface.register(attention.NAME, attention.segment_attention)
        policy.model.set_attn_implementation(attention.NAME)
        delta_net.fork_states(policy.model)
    if fused:
        fused_kernels.fuse_layers(policy.model)
    found = _difference(_scores_and_gradient(policy, lambda: _packed_scores(policy, chains, packing, device)), expected)
    has_experts = getattr(policy.model.config, "num_experts_per_tok", None)
    bounds = _FLOAT32 if dtype == torch.float32 else _BFLOAT16_EXPERTS if has_experts else _BFLOAT16
    remedy = "it cannot be trained on this device" if packing == "padded" else "use training.packing: padded on it"
    reason = _why_another_function(found, rounding, bounds, f"on {device.type}", remedy)
    if reason is not None:
        raise ValueError(f"{path}: {reason}{'; see whether training.fused_kernels: false mends it' if fused else ''}")


def _why_another_function(
    found: _Difference, rounding: _Difference, bounds: _Difference, on_device: str, remedy: str
) -> str | None:
    """Return why the two ways do not compute the same function, None if they do; warn of large rounding."""
    is_equal = [
        one <= bound or (own < math.inf and one <= min(_MAX_ROUNDINGS * own, largest))
        for one, bound, own, largest in zip(found, bounds, rounding, _LARGEST, strict=True)
    ]
    values = (
        f"mean difference of logprobs {found.logprobs:.2g} nats, relative error of the gradient {found.gradient:.2g}, "
        f"of transformers' two implementations of attention {rounding.logprobs:.2g} and {rounding.gradient:.2g}"
    )
    if not is_equal[0]:
        return (
            "this architecture changes its logits after the output embedding, or mixes tokens in an unknown way "
            f"({values}); it cannot be trained here"
        )
    if not is_equal[1]:
        return f"{on_device} the gradient of a batch differs from that of its chains alone ({values}); {remedy}"
    if not all(one <= bound for one, bound in zip(found, bounds, strict=True)):
        warnings.warn(
            f"{on_device} this dtype rounds the model's values much ({values}); training.dtype: float32 rounds less",
            stacklevel=2,
        )
    return None


def _difference(found: _Scores, expected: _Scores) -> _Difference:
    """Compare two ways to compute a batch. A collective."""
    spread = expected.logprobs.std().clamp(max=1.0)
    gap = ((found.logprobs - expected.logprobs).abs().mean() / spread).nan_to_num(torch.inf).double()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    squares = torch.stack([
        torch.stack([(one - other).square().sum(), other.square().sum()])
        for one, other in zip(found.gradient, expected.gradient, strict=True)
    ]).sum(0, dtype=torch.float64)  # fmt: skip
    dist.all_reduce(squares)
    return _Difference(float(gap), float((squares[0] / squares[1]).sqrt()))


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


def _plain_scores(policy: TrainablePolicy, chains: list[TrainingSequence], device: torch.device) -> Tensor:
    """Return the logprobs (M,) of the trained tokens, chain by chain."""
    scores = [policy.plain_logprobs(torch.tensor(one.ids, device=device).long()) for one in chains]
    masks = [torch.from_numpy(one.mask[1:]).to(device) for one in chains]
    return torch.cat([found[mask] for found, mask in zip(scores, masks, strict=True)])


def _packed_scores(
    policy: TrainablePolicy, chains: list[TrainingSequence], packing: Packing, device: torch.device
) -> Tensor:
    """Return the same from one pass."""
    bin = pack_bin(chains, packing)
    scores = policy(make_inputs(bin, device, policy.sequence_ranks), 1.0)
    found: Tensor = scores.logprobs[torch.from_numpy(bin.predictions).to(device)]
    return found
