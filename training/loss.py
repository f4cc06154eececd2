"""The policy-gradient loss per token, with named presets.

A preset defines the loss of one token, and a reducer (`training/plan_builder.py`) its weight; nothing else scales a
gradient.

All presets use two policies: the ratio r is exp(logprob now - logprob recorded when the token was sampled). There is no
third "old" policy: asynchronous agents do not have it any more (arXiv 2605.12070), and every token's own probability is
recorded here.

grpo     min(r A, clip(r) A): PPO's clip (arXiv 1707.06347), clipped alike on both sides: GRPO, arXiv 2402.03300
dr_grpo  the same clip; with mean-centred advantages and a constant denominator: Dr. GRPO, arXiv 2503.20783
dapo     the same clip, wider above than below, with the mean over all tokens: DAPO, arXiv 2503.14476
gspo     the clip of the turn's ratio, which is the geometric mean of its tokens': GSPO-token, arXiv 2507.18071
cispo    stop-gradient of the capped ratio, times A logprob: MiniMax-M1, arXiv 2506.13585
tis      the same with a tighter cap: truncated importance sampling against the sampling engine, Yao et al. 2025, "Your
         efficient RL framework secretly brings you off-policy RL training"
icepop   r A, but tokens with r outside [mask_low, mask_high] get no gradient: Ring-1T, arXiv 2510.18855
seq_mis  stop-gradient of the turn's ratio, the product of its tokens', times A logprob; turns above ratio_cap get no
         gradient: masked importance sampling, Liu, Li et al. 2025, "When speed kills stability"
sft      -logprob, independent of A and r
brief    the clip of grpo, wider above than below, with the settings of slime's and vime's example coding_agent_rl: mean
         per rollout, the advantage split over a rollout's chains, no loss for turns that drifted

The sequence of `gspo` and `seq_mis` is the turn: one model call, whose tokens are in one chain and so in one bin. The
product over a whole agent rollout carries no information: T x KL is far beyond any clamp.

Shape legend: N = trained tokens of a bin, all its chains concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ratchet.import_path import import_function

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import LossConfig

MAX_LOG_RATIO = 20.0
"""Bound of every |log-ratio| before it is exponentiated. An infinite ratio would not be removed by a mask: infinity
times 0 is NaN, in the loss and in its gradient. A token beyond the bound gets no gradient through its own ratio."""


@dataclass(slots=True, frozen=True)
class TokenBatch:
    """The inputs of a loss, for the N trained tokens of a bin. All have shape (N,) and dtype float32, except `turns`.

    `logprobs`: of the current policy; gradients flow through them only. `behaviour`: logprobs recorded when the tokens
    were sampled. `turns`: int64, the turn of each token, numbered from 0 within the bin.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    turns: Tensor

    @property
    def ratios(self) -> Tensor:
        """Return exp(logprobs - behaviour), (N,), between exp(-MAX_LOG_RATIO) and exp(MAX_LOG_RATIO)."""
        return bounded_exp(self.logprobs - self.behaviour)

    def turn_log_ratios(self, mean: bool) -> Tensor:
        """Return the log-ratio of each token's turn, (N,): the sum over the turn's trained tokens, or their mean."""
        num_turns = int(self.turns.max()) + 1 if len(self.turns) else 0
        sums = self.logprobs.new_zeros(num_turns).index_add(0, self.turns, self.logprobs - self.behaviour)
        if mean:
            sums = sums / torch.bincount(self.turns, minlength=num_turns).clamp(min=1)
        return sums[self.turns]


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return the ratios, (N,). NaN stays NaN, also in the gradient, so that no mask hides a damaged logprob."""
    return torch.where(log_ratios.isnan(), log_ratios, log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


Loss = Callable[[TokenBatch, "LossConfig"], Tensor]


def _clipped(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    return _clip(tokens.ratios, tokens.advantages, loss)


def _gspo(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    """The value of each token is the ratio of its turn; its gradient is that of its own logprob."""
    ratios = (
        bounded_exp(tokens.turn_log_ratios(mean=True).detach()) * (tokens.logprobs - tokens.logprobs.detach()).exp()
    )
    return _clip(ratios, tokens.advantages, loss)


def _clip(ratios: Tensor, advantages: Tensor, loss: LossConfig) -> Tensor:
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages)


def _capped(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    return -tokens.ratios.detach().clamp(max=loss.ratio_cap) * tokens.advantages * tokens.logprobs


def _icepop(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    ratios = tokens.ratios
    kept = (ratios >= loss.mask_low) & (ratios <= loss.mask_high)
    return -torch.where(kept, ratios, torch.zeros_like(ratios)) * tokens.advantages


def _seq_mis(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    ratios = bounded_exp(tokens.turn_log_ratios(mean=False).detach())
    return -torch.where(ratios > loss.ratio_cap, torch.zeros_like(ratios), ratios) * tokens.advantages * tokens.logprobs


def _sft(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    return -tokens.logprobs


LOSS_PRESETS: dict[str, Loss] = {
    "grpo": _clipped,
    "dr_grpo": _clipped,
    "dapo": _clipped,
    "gspo": _gspo,
    "cispo": _capped,
    "tis": _capped,
    "icepop": _icepop,
    "seq_mis": _seq_mis,
    "sft": _sft,
    "brief": _clipped,
}


def find_loss(preset: str) -> Loss:
    """Return the loss of a preset, or the function `package.module:function`. Raises ConfigError if there is none."""
    return LOSS_PRESETS[preset] if preset in LOSS_PRESETS else import_function("loss.preset", preset)


def token_loss(tokens: TokenBatch, loss: LossConfig) -> Tensor:
    """Return the loss per trained token, float32 (N,), before any weight. Raises ValueError for another shape."""
    values = find_loss(loss.preset)(tokens, loss)
    if values.shape != tokens.logprobs.shape:
        raise ValueError(
            f"loss.preset {loss.preset}: returned shape {tuple(values.shape)}, expected {tuple(tokens.logprobs.shape)}"
        )
    return values


class ClipMasks(NamedTuple):
    """Bool masks, (N,) each: True at tokens whose gradient the preset's lower or upper bound removes."""

    low: Tensor
    high: Tensor


def clip_masks(tokens: TokenBatch, loss: LossConfig) -> ClipMasks:
    """Return the tokens whose gradient the preset removes; for a custom loss, those outside of the clip."""
    with torch.no_grad():
        match loss.preset:
            case "icepop":
                return ClipMasks(tokens.ratios < loss.mask_low, tokens.ratios > loss.mask_high)
            case "cispo" | "tis":
                none = torch.zeros_like(tokens.logprobs, dtype=torch.bool)
                return ClipMasks(none, tokens.ratios > loss.ratio_cap)
            case "seq_mis":
                over = bounded_exp(tokens.turn_log_ratios(mean=False)) > loss.ratio_cap
                return ClipMasks(torch.zeros_like(over), over)
            case "gspo":
                ratios = bounded_exp(tokens.turn_log_ratios(mean=True))
            case "sft":
                ratios = torch.ones_like(tokens.logprobs)
            case _:
                ratios = tokens.ratios
        low = (ratios < 1 - loss.clip_low) & (tokens.advantages < 0)
        high = (ratios > 1 + loss.clip_high) & (tokens.advantages > 0)
        return ClipMasks(low, high)
