"""Metrics of a step, and its alarms: sums over trained tokens, added up over bins and ranks and divided once.

docs/training.md explains the names. Gradient norms are added by `learner.py`, timings by `train_loop.py` and
`publisher.py`, figures of engines by `engine/weight_update.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from training.loss import TokenBatch, bounded_exp, clip_masks
from training.plan_types import Member, TrainingSequence

if TYPE_CHECKING:  # a step needs neither pydantic nor the store
    from ratchet.config import LossConfig
    from store.training_groups import ConsumedGroup


@dataclass(slots=True)
class StepSums:
    """Sums over the trained tokens of one rank, added to bin by bin.

    `chain_tokens`: tokens of the chains, each counted in full. `computed_tokens`: tokens of the forward passes, with
    padding. `flops`: of forward and backward passes. `fresh_tokens`: tokens sampled by the current weights, on which
    only the engine's arithmetic differs. `reference_tokens`: tokens that the reference has scored. The peaks are the
    highest |learner's logprob - recorded logprob|, over all tokens and over fresh tokens.
    """

    num_tokens: float = 0.0
    loss: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    abs_mismatch: float = 0.0
    masked_low: float = 0.0
    masked_high: float = 0.0
    masked_positive: float = 0.0
    ratios: float = 0.0
    squared_ratios: float = 0.0
    chain_tokens: float = 0.0
    computed_tokens: float = 0.0
    flops: float = 0.0
    fresh_tokens: float = 0.0
    abs_engine_noise: float = 0.0
    reference_tokens: float = 0.0
    reference_kl: float = 0.0
    teacher_tokens: float = 0.0
    teacher_kl: float = 0.0
    peak_mismatch: float = 0.0
    peak_noise: float = 0.0

    def add(
        self,
        tokens: TokenBatch,
        entropies: Tensor,
        weighted_loss: Tensor,
        loss: LossConfig,
        fresh: Tensor | None = None,
    ) -> None:
        """Add one bin. `fresh`: bool (N,), the tokens sampled by the current weights.

        `mismatch_kl` is the k3 estimator of KL(recorded || now) (Schulman, "Approximating KL divergence").
        """
        with torch.no_grad():
            low, high = clip_masks(tokens, loss)
            log_ratios = tokens.logprobs - tokens.behaviour
            ratios = bounded_exp(log_ratios)
            self.num_tokens += len(ratios)
            self.loss += float(weighted_loss)
            self.entropy += float(entropies.sum())
            self.mismatch_kl += float((ratios - 1 - log_ratios).sum())
            self.abs_mismatch += float(log_ratios.abs().sum())
            self.masked_low += float(low.sum())
            self.masked_high += float(high.sum())
            self.masked_positive += float(((low | high) & (tokens.advantages > 0)).sum())
            self.ratios += float(ratios.sum())
            self.squared_ratios += float(ratios.square().sum())
            gaps = log_ratios.abs()
            # NaN, an unknown logprob of an endpoint's answer, makes the peak unknown, too, which `max` does not.
            self.peak_mismatch = float(np.maximum(self.peak_mismatch, float(gaps.max()) if len(gaps) else 0.0))
            if fresh is not None and bool(fresh.any()):
                self.fresh_tokens += float(fresh.sum())
                self.abs_engine_noise += float(gaps[fresh].sum())
                self.peak_noise = max(self.peak_noise, float(gaps[fresh].max()))

    def add_frozen(self, reference_kl: Tensor | None, teacher_gaps: Tensor | None) -> None:
        """Add what the reference and the teacher say of the tokens of a bin, (N,) each, None without such a model."""
        if reference_kl is not None:
            self.reference_tokens += len(reference_kl)
            self.reference_kl += float(reference_kl.detach().sum())
        if teacher_gaps is not None:
            self.teacher_tokens += len(teacher_gaps)
            self.teacher_kl += float(teacher_gaps.sum())

    def as_list(self) -> list[float]:
        """Return all sums but the peaks, which cannot be added over ranks."""
        return [float(getattr(self, name)) for name in _SUMMED]


def token_metrics(totals: Sequence[float]) -> dict[str, float]:
    """Return means per trained token from sums over all ranks.

    `ratio_ess`: effective sample size of the ratios, as a fraction of the tokens; 1 is on policy.
    """
    sums = StepSums(**dict(zip(_SUMMED, totals, strict=True)))
    tokens = max(sums.num_tokens, 1.0)
    engine_noise = {"engine_noise_abs": sums.abs_engine_noise / sums.fresh_tokens} if sums.fresh_tokens else {}
    reference = {"reference_kl": sums.reference_kl / sums.reference_tokens} if sums.reference_tokens else {}
    teacher = {"teacher_kl": sums.teacher_kl / sums.teacher_tokens} if sums.teacher_tokens else {}
    return {
        **engine_noise,
        **reference,
        **teacher,
        "loss": sums.loss,
        "trained_tokens": sums.num_tokens,
        "entropy": sums.entropy / tokens,
        "mismatch_kl": sums.mismatch_kl / tokens,
        "mismatch_abs": sums.abs_mismatch / tokens,
        "masked_fraction": (sums.masked_low + sums.masked_high) / tokens,
        "masked_low_fraction": sums.masked_low / tokens,
        "masked_high_fraction": sums.masked_high / tokens,
        "masked_positive_fraction": sums.masked_positive / tokens,
        "ratio_ess": sums.ratios**2 / (tokens * sums.squared_ratios) if sums.squared_ratios else 1.0,
        "chain_tokens": sums.chain_tokens,
        "computed_tokens": sums.computed_tokens,
        "tree_token_ratio": sums.chain_tokens / max(sums.computed_tokens, 1.0),
        "kl_over_entropy": sums.mismatch_kl / max(sums.entropy, 1e-9),
        "tflop": sums.flops / 1e12,
    }


def peak_metrics(peaks: Sequence[float]) -> dict[str, float]:
    """Name the maxima over ranks: two gaps of logprobs, in nats, and memory in GiB."""
    return dict(zip(("mismatch_max", "engine_noise_max", "peak_memory_gib"), peaks, strict=True))


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values, which a store, a curve and a sink can hold; `nonfinite_metrics` counts the others."""
    kept = {name: value for name, value in metrics.items() if isfinite(value)}
    num_left_out = len(metrics) - len(kept)
    return kept | ({"nonfinite_metrics": float(num_left_out)} if num_left_out else {})


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this rank in GiB: torch's allocations on its GPU, or the process's resident memory."""
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else getrusage(RUSAGE_SELF).ru_maxrss * 1024
    return held / 2**30


def reward_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Return means over the plan's rollouts, also over those without a trained token; the reward of forks is apart,
    and a plan of forks alone has no `reward_mean`."""
    names = {"reward_mean": False, "fork_reward_mean": True}
    rewards = {name: [one.reward for one in members if one.is_fork == forks] for name, forks in names.items()}
    trained = [member for member in members if member.num_tokens > 0]
    return {name: sum(found) / len(found) for name, found in rewards.items() if found} | {
        "rollouts": float(len(members)),
        "groups": float(len({member.group_id for member in members})),
        "tokens_per_rollout": sum(member.num_tokens for member in trained) / max(1, len(trained)),
    }


def group_metrics(groups: Sequence[ConsumedGroup]) -> dict[str, float]:
    """Return counts of the groups that the step consumed, and the fractions that had signal and that were solved."""
    total = max(1, len(groups))
    counts = {
        f"groups_{use}": float(sum(one.use == use for one in groups)) for use in ("trained", "no_signal", "expired")
    }
    num_unsolved = sum(max(one.rewards, default=0.0) <= 0 for one in groups)
    num_solved = sum(min(one.rewards, default=0.0) >= 1 for one in groups)
    solved = {"none": num_unsolved, "all": num_solved, "some": len(groups) - num_unsolved - num_solved}
    fractions = {f"groups_solved_{name}_fraction": number / total for name, number in solved.items()}
    fractions["groups_with_signal_fraction"] = counts["groups_trained"] / total
    truncated = sum(one.num_truncated for one in groups) / max(1, sum(len(one.rewards) for one in groups))
    return counts | fractions | {"truncated_fraction": truncated}


def sequence_metrics(step: int, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """Return staleness in steps over the trained tokens; step n trains weights n - 1.

    A version newer than these weights was sampled before a crash; its staleness counts as 0.
    """
    num_rollouts = max(1, len({one.rollout_id for one in sequences}))
    found = {"chains_per_rollout": len(sequences) / num_rollouts}
    known = [(one.rollout_id, one.policy_steps[one.mask]) for one in sequences if one.policy_steps is not None]
    if not known:
        return found
    versions = {(rollout, int(version)) for rollout, steps in known for version in np.unique(steps)}
    ages = np.maximum(0, step - 1 - np.concatenate([steps for _, steps in known]))
    found |= {
        "staleness_mean": float(ages.mean()),
        "staleness_p95": float(np.percentile(ages, 95)),
        "staleness_max": float(ages.max()),
    }
    return found | {"versions_per_rollout": len(versions) / num_rollouts}


def replay_metrics(sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """Return the fraction of trained tokens predicted with the experts that the engine chose, {} without replay."""
    known = [one.experts.known[:-1][one.mask[1:]] for one in sequences if one.experts is not None]
    if not known:
        return {}
    return {"router_replay_fraction": float(np.concatenate(known).mean())}


def speed_metrics(
    metrics: Mapping[str, float], seconds: float, num_ranks: int, peak_flops: float | None
) -> dict[str, float]:
    """Return rates per second, over `seconds` of the step's passes and updates.

    Compare chain tokens with published figures, and computed tokens with the limits of this machine. `mfu` (model FLOPs
    utilisation) is included if the device's peak is known.
    """
    found = {f"{name}_per_second": metrics[name] / seconds for name in ("chain_tokens", "computed_tokens", "tflop")}
    return found | ({"mfu": found["tflop_per_second"] * 1e12 / (num_ranks * peak_flops)} if peak_flops else {})


def adamw_update_norm(optimiser: torch.optim.AdamW) -> Tensor:
    """Return the squared L2 norm of the last update of this rank's weights, float64; call it before `schedule.step()`.

    It is computed from the optimiser's moments, so that no copy of the weights is needed:
    new = old (1 - lr decay) - lr m / (sqrt(v) + epsilon).
    """
    total: Tensor | None = None
    for group in optimiser.param_groups:
        rate = group["lr"]
        beta1, beta2 = group["betas"]
        epsilon = group["eps"]
        decay = group["weight_decay"]
        known = [(one, optimiser.state[one]) for one in group["params"] if optimiser.state.get(one)]
        # One transfer: if the kernels are fused, the counts are on the GPU.
        counts = torch.stack([state["step"] for _, state in known]).tolist() if known else []
        for (parameter, state), count in zip(known, counts, strict=True):
            correction = (1 - beta2**count) ** 0.5
            divisor = _local(state["exp_avg_sq"]).sqrt().add_(epsilon * correction)
            moved = divisor.reciprocal_().mul_(_local(state["exp_avg"])).mul_(rate * correction / (1 - beta1**count))
            if decay:
                shrunk = rate * decay / (1 - rate * decay)
                moved.mul_(1 + shrunk).add_(_local(parameter.detach()), alpha=shrunk)
            length = torch.linalg.vector_norm(moved, dtype=torch.float64).square()
            total = length if total is None else total + length
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


ALARMS: dict[str, tuple[Callable[[Mapping[str, float]], bool], str]] = {
    "entropy_collapse": (
        # Low entropy alone is normal where most tokens of a turn are fixed, such as the form of a tool call.
        lambda m: m.get("entropy", 1.0) < 0.02 and m.get("groups_with_signal_fraction", 1.0) < 0.5,
        "the policy has become almost deterministic, and most groups get equal rewards; raise temperature or "
        "entropy_bonus",
    ),
    "entropy_explosion": (
        lambda m: m.get("entropy", 0.0) > 5.0,
        "the policy has become almost uniform; lower the learning rate or entropy_bonus",
    ),
    "off_policy": (
        lambda m: m.get("ratio_ess", 1.0) < 0.3,
        "few tokens dominate the step; lower max_staleness or the learning rate",
    ),
    "engine_mismatch": (
        lambda m: m.get("engine_noise_abs", 0.0) > 0.1,
        "engine and learner differ on tokens of the same weights; look at canary_gap_mean",
    ),
    "router_replay": (
        lambda m: m.get("router_replay_fraction", 1.0) < 0.9,
        "turns have no recorded experts, and the learner routes their tokens by itself; an engine that already runs "
        "must be started with --enable-return-routed-experts",
    ),
    "drifting": (
        lambda m: m.get("mismatch_kl", 0.0) > 0.1,
        "the policy is far from the one that sampled; lower max_staleness or the learning rate",
    ),
    "metric_sink": (
        lambda m: any(name.startswith("sink_lost_") for name in m),
        "a metric sink has lost points; `ratchet admin logs learner` has its error. The store has all of them",
    ),
    "skipped_updates": (
        lambda m: m.get("skipped_updates", 0.0) > 0,
        "a gradient was not finite and its update was left out; look at the recorded logprobs of its rollouts",
    ),
    "truncated": (
        lambda m: m.get("truncated_fraction", 0.0) > 0.5,
        "most agents were ended by a limit; raise turns, context or time",
    ),
    "masked": (lambda m: m.get("masked_fraction", 0.0) > 0.3, "a third of the tokens get no gradient"),
    "no_contrast": (
        lambda m: m.get("groups_with_signal_fraction", 1.0) < 0.3,
        "most groups are all solved or all failed; filter tasks",
    ),
}
"""Name -> (condition on the metrics, meaning and remedy)."""


def alarms(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: meaning for name, (condition, meaning) in ALARMS.items() if condition(metrics)}


_SUMMED = [one.name for one in fields(StepSums) if not one.name.startswith("peak_")]
NUM_SUMS = len(_SUMMED)
