"""On-policy distillation (`loss.distillation`): the policy learns from a teacher on the tokens that it sampled itself.

The loss of a token is its log-ratio to the teacher, log p - log q, times its logprob, with the first factor held fixed
and weighted by the ratio r of the policy to the one that sampled the token, at most `loss.ratio_cap`. Its mean gradient
over the policy's samples is that of KL(policy || teacher) per token: the reverse KL of GKD (Agarwal et al., arXiv
2306.13649) on the student's own samples, as MiniLLM has it (Gu et al., arXiv 2306.08543). The teacher says something of
every token, so groups whose rewards are equal are trained, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.loss import MAX_LOG_RATIO
from training.policy_loading import LoadedPolicy
from training.policy_model import TrainablePolicy
from training.reference import load_frozen

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import RunConfig


def load_teacher(
    config: RunConfig, model_path: Path, loaded: LoadedPolicy, device: torch.device
) -> TrainablePolicy | None:
    """Load and freeze the teacher, None without `loss.distillation`. A collective.

    Raises ValueError if the model cannot be the teacher of `loaded`, the policy from `model_path`.
    """
    if config.loss.teacher_model is None or not config.loss.distillation:
        return None
    return load_frozen("loss.teacher_model", Path(config.loss.teacher_model), config, model_path, loaded, device)


def teacher_gaps(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """Return log p - log q per token, (N,), in nats, within MAX_LOG_RATIO of 0; no gradient flows through it."""
    return (logprobs.detach() - teacher).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def teacher_losses(logprobs: Tensor, gaps: Tensor, ratios: Tensor) -> Tensor:
    """Return the loss per token, (N,), from the policy's logprobs, `teacher_gaps` and the capped ratios, (N,) each."""
    return ratios.detach() * gaps * logprobs
