"""The frozen models of the loss: the reference of `loss.reference_kl` and the teacher of `loss.distillation`.

The policy is kept close to the reference.
KL(policy || reference) is estimated per trained token by r (exp(d) - 1 - d): the k3 estimator (Schulman, "Approximating
KL divergence"), with d the reference's logprob minus the policy's, times the ratio r of the policy to the one that
sampled the token, at most `loss.ratio_cap`. Gradients flow through d and r. Without r, the gradient would be that of
another divergence, also for tokens that the policy itself sampled (DeepSeek-V3.2, arXiv 2512.02556).

In on-policy distillation the policy learns from the teacher on the tokens that it sampled itself. The loss of a token
is its log-ratio to the teacher, log p - log q, times its logprob, with the first factor held fixed and weighted by the
ratio r, as above. Its mean gradient over the policy's samples is that of KL(policy || teacher) per token: the reverse
KL of GKD (Agarwal et al., arXiv 2306.13649) on the student's own samples, as MiniLLM has it (Gu et al., arXiv
2306.08543). The teacher says something of every token, so groups whose rewards are equal are trained, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import canary
from training.loss import MAX_LOG_RATIO
from training.policy_loading import LoadedPolicy, load_policy
from training.policy_model import TrainablePolicy

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import RunConfig


def load_frozen(
    key: str, path: Path | str | None, config: RunConfig, model_path: Path, loaded: LoadedPolicy, device: torch.device
) -> TrainablePolicy | None:
    """Load the model of the config's `key` like the policy, sharded over all ranks, and freeze it; None without a
    path. A collective.

    Raises ValueError if it cannot score the tokens of `loaded`, the policy from `model_path`, in the same bins.
    """
    if path is None:
        return None
    from ratchet.model_directory import megatron_checkpoint  # which needs pydantic

    checkpoint = megatron_checkpoint(Path(path))
    form = Path(path) if checkpoint is None else model_path
    if form != model_path and canary.canary_ids(form) != canary.canary_ids(model_path):
        raise ValueError(
            f"{key}: {path} has another tokenizer than the policy, so it cannot score the policy's "
            "tokens; name a model of the same family"
        )
    own = {"lora": None, "router_replay": False, "expert_parallel": 1}  # of the policy alone
    whole = config.model_copy(update={"training": config.training.model_copy(update=own)})
    try:
        frozen = load_policy(form, whole, device, loaded.policy.sequence_ranks, checkpoint)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if frozen.packing != loaded.packing:
        raise ValueError(
            f"{key}: {path} needs training.packing: {frozen.packing}, and the policy uses "
            f"{loaded.packing}; set training.packing: padded"
        )
    frozen.policy.requires_grad_(False)
    return frozen.policy.eval()


def kl_estimates(logprobs: Tensor, reference: Tensor, ratios: Tensor) -> Tensor:
    """Return the estimate of KL(policy || reference) per token, (N,), of two logprobs and a ratio, (N,) each.

    A token that the reference finds over exp(MAX_LOG_RATIO) times more or less likely gets no gradient through d.
    """
    gaps = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ratios * (gaps.exp() - 1 - gaps)


def teacher_gaps(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """Return log p - log q per token, (N,), in nats, within MAX_LOG_RATIO of 0; no gradient flows through it."""
    return (logprobs.detach() - teacher).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def teacher_losses(logprobs: Tensor, gaps: Tensor, ratios: Tensor) -> Tensor:
    """Return the loss per token, (N,), from the policy's logprobs, `teacher_gaps` and the capped ratios, (N,) each."""
    return ratios.detach() * gaps * logprobs
