"""The learner of one rank: policy, optimiser and the step function. Knows torch, and neither Ray nor the store.

Why here: Ray Train, torchrun and a test are all shells of a few lines around this class.
Called by: `training/ray_driver.py` and the tests.

    plan + sequences ─▶ bins ─▶ logprobs of trained tokens ─▶ token loss × weight ─▶ backward ─▶ one optimiser update

Shape legend: M = predicted tokens of a bin, N = its trained tokens, one per (chain, position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig

from engine import canary, policy_files
from training import checkpoint
from training.loss import TokenBatch, find_loss, token_loss
from training.metrics import (
    NUM_SUMS,
    StepSums,
    adamw_update_norm,
    peak_memory_gib,
    peak_metrics,
    reward_metrics,
    token_metrics,
)
from training.packing import Bin, make_bins, split_among_ranks
from training.plan_types import Member, Plan, TrainingSequence
from training.policy_model import ForwardWork, load_policy, pair_cost, peak_flops, shard_policy
from training.prefix_tree import Segment

if TYPE_CHECKING:  # pydantic stays with who reads the config
    from ratchet.config import RunConfig


@dataclass(slots=True, frozen=True)
class StepResult:
    """`metrics` are equal on every rank; `finite` False: a gradient was not, and the learner must be thrown away."""

    metrics: dict[str, float]
    finite: bool


class RankLearner:
    def __init__(self, model_path: Path, config: RunConfig) -> None:
        """Needs an initialised process group. The same path, config and world size give the same learner, bit by bit."""
        self.config, self.model_path = config, model_path
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        training = config.training
        find_loss(config.loss.preset)
        policy, self.packing = load_policy(model_path, config, self.device)
        self.pair_cost = pair_cost(policy.model.config, sum(parameter.numel() for parameter in policy.parameters()))
        self.work, self.peak_flops = ForwardWork.of(policy), peak_flops(self.device, training.dtype)
        self.policy = shard_policy(policy, self.device, self.world_size, getattr(torch, training.dtype))
        self.saving = dist.new_group(backend="gloo")
        self.optimiser = torch.optim.AdamW(
            self.policy.parameters(),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        warmup = training.warmup_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda update: min(1.0, (update + 1) / max(1, warmup))
        )

    def step(self, plan: Plan, sequences: Sequence[TrainingSequence]) -> StepResult:
        """One pass over the plan's sequences in its updates. Every rank is given all sequences and works on its own."""
        # Randomness is a function of (seed, step, rank): a replay needs no saved generator, whatever the number of ranks was.
        torch.manual_seed(((plan.seed * 1_000_003 + plan.step) * 4096 + self.rank) % (1 << 62))
        members = {member.rollout_id: member for member in plan.members}
        totals = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self.device)
        peaks = torch.zeros(3, dtype=torch.float64, device=self.device)
        grad_norm, update_norm, learning_rate = 0.0, 0.0, self.schedule.get_last_lr()[0]
        self.policy.train()
        for number in range(plan.num_updates):
            mine = [sequence for sequence in sequences if members[sequence.rollout_id].update == number]
            if not mine:
                continue  # fewer groups than updates
            sums = self.accumulate(mine, members, plan.step - 1 if number == 0 else None)
            totals += torch.tensor(sums.as_list(), dtype=torch.float64, device=self.device)
            peaks[:2] = torch.maximum(
                peaks[:2], torch.tensor([sums.peak_mismatch, sums.peak_noise], device=self.device)
            )
            learning_rate = float(self.schedule.get_last_lr()[0])
            norm, moved = self._update()
            if not isfinite(norm):
                return StepResult({"grad_norm": norm}, finite=False)
            grad_norm, update_norm = max(grad_norm, norm), max(update_norm, moved)
        dist.all_reduce(totals)
        peaks[2] = peak_memory_gib(self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        norms = {"grad_norm": grad_norm, "update_norm": update_norm, "learning_rate": float(learning_rate)}
        metrics = token_metrics(totals.tolist()) | norms | peak_metrics(peaks.tolist()) | reward_metrics(plan.members)
        return StepResult(metrics, finite=True)

    def accumulate(
        self, sequences: Sequence[TrainingSequence], members: dict[int, Member], fresh_step: int | None = None
    ) -> StepSums:
        """Gradients of this rank's bins. Every rank runs the same number of passes: FSDP's collectives need it. `fresh_step`: of the
        weights as they are now.
        """
        shares = split_among_ranks(sequences, self.world_size, self.packing, self.pair_cost)
        bins = [make_bins(share, self.config.training.bin_tokens, self.packing) for share in shares]
        mine, spare = bins[self.rank], next(share[0] for share in bins if share)
        sums = StepSums()
        for number in range(max(len(share) for share in bins)):
            real = number < len(mine)
            loss = self._bin_loss(mine[number] if real else spare, members, sums if real else None, fresh_step)
            # FSDP averages gradients over ranks; the weights are for the sum.
            torch.autograd.backward(loss * (self.world_size if real else 0.0))
        return sums

    def _bin_loss(self, bin: Bin, members: dict[int, Member], sums: StepSums | None, fresh_step: int | None) -> Tensor:
        positions = None if bin.positions is None else self._tensor(bin.positions)
        where = (self._tensor(bin.ids), positions, bin.segments, self._tensor(bin.sources), self._tensor(bin.targets))
        logprobs_M, entropies_M = self.policy(*where, bin.temperature)
        predictions_N = self._tensor(bin.predictions)
        owners, owner_N = np.unique(bin.rollout_ids, return_inverse=True)
        facts = np.array(
            [[members[int(owner)].advantage, members[int(owner)].weight] for owner in owners], dtype=np.float32
        )[owner_N]
        turns_N = np.unique(bin.turn_ids, return_inverse=True)[1]
        advantages_N, weights_N = self._tensor(facts).unbind(-1)
        tokens = TokenBatch(logprobs_M[predictions_N], self._tensor(bin.behaviour), advantages_N, self._tensor(turns_N))
        entropies_N = entropies_M[predictions_N]
        losses_N = token_loss(tokens, self.config.loss)
        if self.config.loss.entropy_bonus:
            losses_N = losses_N - self.config.loss.entropy_bonus * entropies_N
        loss = (losses_N * weights_N).sum()
        if sums is not None:
            fresh = None if fresh_step is None else self._tensor(bin.policy_steps == fresh_step)
            sums.add(tokens, entropies_N, loss.detach(), self.config.loss, fresh)
            sums.chain_tokens += bin.num_chain_tokens
            sums.computed_tokens += bin.ids.size
            sums.flops += self.work.flops(bin.ids.size, len(bin.targets), bin.num_pairs)
        return loss

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _update(self) -> tuple[float, float]:
        """One optimiser update: the gradient's norm before clipping, and the update's. Where the first is not finite, nothing changes."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.training.max_grad_norm)
        value = float(norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm)
        moved = torch.zeros((), dtype=torch.float64, device=self.device)
        if isfinite(value):
            self.optimiser.step()
            moved += adamw_update_norm(self.optimiser)
            self.schedule.step()
        self.optimiser.zero_grad()
        dist.all_reduce(moved)
        return value, float(moved.sqrt())

    def publish(self, directory: Path) -> list[dict[str, Any]]:
        """A collective of all ranks; rank 0 writes the model in its own dtype and returns the files, the others return []."""
        state = get_model_state_dict(self.policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank != 0:
            return []
        return policy_files.publish_policy(published_state(state, self.model_path), self.model_path, directory)

    def canary(self) -> dict[str, Any]:
        """What these weights say about the fixed text. A collective of all ranks."""
        ids = canary.canary_ids(self.model_path)[: self.config.sampling.max_context_tokens - 1]  # the engine adds one
        ids_1T, targets = torch.tensor([ids], device=self.device), torch.arange(1, len(ids), device=self.device)
        whole = None if self.packing == "padded" else [Segment(0, len(ids), len(ids), 0, -1)]
        positions = torch.arange(len(ids), device=self.device)[None]
        with torch.no_grad():
            logprobs, _ = self.policy(ids_1T, positions, whole, targets - 1, ids_1T[0, 1:], 1.0)
        return canary.canary_row(ids, logprobs.cpu().numpy())

    def save_later(self, uri: str) -> Future[Any]:
        """The checkpoint as it is now, written beside the next steps; a collective of all ranks."""
        return checkpoint.save_later(self.policy, self.optimiser, self.schedule, uri, self.saving)

    def load(self, uri: str) -> None:
        checkpoint.load_checkpoint(self.policy, self.optimiser, self.schedule, uri)


def published_state(state: Mapping[str, Any], model_path: Path) -> dict[str, Tensor]:
    """A policy's tensors under the model's own names, in the model's own dtype, tied ones once."""
    settings = AutoConfig.from_pretrained(model_path, local_files_only=True)
    dtype = settings.dtype if isinstance(settings.dtype, torch.dtype) else torch.float32
    named = {
        name.removeprefix("model."): tensor.to(dtype) for name, tensor in state.items() if isinstance(tensor, Tensor)
    }
    if settings.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    return named
