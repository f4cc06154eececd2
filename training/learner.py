"""The step function of one rank: policy, optimiser, and one pass over the sequences of a plan.

It depends on torch and transformers only, neither on Ray nor on the store, so that Ray Train, torchrun and a test can
run it alike.

    plan + sequences -> bins -> logprobs of trained tokens -> token loss x weight -> backward -> one optimiser update

Shape legend: M = predicted tokens of a bin, N = its trained tokens, one per (chain, position).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine import canary, policy_files
from ratchet.token_statistics import TrainedToken, TrainedTurn
from ratchet.types import JsonObject
from training import checkpoint, lora, model_files, router_replay
from training.loss import TokenBatch, clip_masks, find_loss, token_loss
from training.metrics import (
    NUM_SUMS,
    StepSums,
    adamw_update_norm,
    finite_metrics,
    peak_memory_gib,
    peak_metrics,
    reward_metrics,
    token_metrics,
)
from training.packing import Bin, deal_bins, pack_bin, spare_chain
from training.plan_types import Member, Plan, TrainingSequence
from training.policy_inputs import make_inputs
from training.policy_loading import compute_dtype, load_policy, measure_cost
from training.policy_model import TrainablePolicy, peak_flops
from training.rank_zero import read_on_rank_zero
from training.reference import kl_estimates, load_frozen, teacher_gaps, teacher_losses
from training.token_statistics import LargestRatios, TrainedTurns

if TYPE_CHECKING:  # a step needs no pydantic
    from ratchet.config import RunConfig

_WRITE_TIMEOUT = timedelta(hours=6)
"""Time limit of the collective in which ranks wait until rank 0 has written the weights."""


@dataclass(slots=True, frozen=True)
class StepResult:
    """The outcome of a step, equal on every rank except for `trained_turns`, which other ranks than 0 leave empty.

    `metrics` are finite. `num_skipped`: updates that were left out because their gradient was not finite; they changed
    neither weights nor optimiser. `largest_ratios`: the trained tokens whose ratios are furthest from 1, the furthest
    first. `trained_turns`: entropy and log-ratio of every trained token.
    """

    metrics: dict[str, float]
    num_skipped: int = 0
    largest_ratios: Sequence[TrainedToken] = ()
    trained_turns: Sequence[TrainedTurn] = ()


class UpdateNorms(NamedTuple):
    """L2 norms of one optimiser update: of the gradient before clipping, and of the change of the weights."""

    gradient: float
    weights: float


class RankLearner:
    """The policy and its optimiser on one rank.

    The `group` of this rank, one of `num_groups`, has bins of its own: it is the rank alone, or those that share bins.
    """

    def __init__(self, model_path: Path, config: RunConfig) -> None:
        """Needs an initialised process group. The same path, config and world size give a bit-identical learner."""
        self.config = config
        self.model_path = model_path
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        training = config.training
        find_loss(config.loss.preset)  # raises for an unknown loss before the model is loaded
        loaded = load_policy(model_path, config, self.device)
        self.policy, self.packing, self.work, self.cost = loaded
        if self.packing == "auto" and self.device.type == "cuda":
            self.cost = measure_cost(loaded, config.sampling.max_context_tokens, training.bin_tokens, self.device)
        loss, known = config.loss, (config, model_path, loaded, self.device)
        reference = (loss.reference_model or model_path) if loss.reference_kl else None
        self.reference = load_frozen("loss.reference_model", reference, *known)
        self.teacher = load_frozen("loss.teacher_model", loss.teacher_model if loss.distillation else None, *known)
        self.peak_flops = peak_flops(self.device, compute_dtype(training.dtype, self.device))
        self._save_group = dist.new_group(backend="gloo")
        self._waiting_group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
        ranks = self.policy.sequence_ranks
        bin_ranks = 1 if ranks is None else ranks.size
        self.num_groups = self.world_size // bin_ranks
        self.group = self.rank // bin_ranks
        self.is_first_of_group = self.rank % bin_ranks == 0
        self.base_files: list[JsonObject] = []
        self.adapter: str | None = None
        if training.lora is not None:
            self.base_files = read_on_rank_zero(
                lambda: policy_files.weight_files(policy_files.describe_files(model_path))
            )
            self.adapter = lora.describe(training.lora, self.base_files)
        self.untouched: policy_files.UntouchedTensors | None = None
        if training.lora is None and self.rank == 0:
            names = model_files.untouched_names(self.policy.model, model_path)
            self.untouched = policy_files.UntouchedTensors(model_path, names)
        self.trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.trained,
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
            # One kernel for all weights. It was not tried with weights over different meshes, as divided experts are.
            fused=self.device.type == "cuda" and training.expert_parallel == 1,
        )
        self.num_copies = self.world_size // (training.shard_ranks or self.world_size)
        warmup = training.warmup_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda update: min(1.0, (update + 1) / max(1, warmup))
        )

    def step(self, plan: Plan, sequences: Sequence[TrainingSequence]) -> StepResult:
        """Train the plan's sequences once, in its updates. Every rank gets all sequences and computes its own share."""
        # Random numbers depend on (seed, step, rank) only, so a replay needs no saved generator state.
        torch.manual_seed(((plan.seed * 1_000_003 + plan.step) * 4096 + self.rank) % (1 << 62))
        members = {member.rollout_id: member for member in plan.members}
        totals = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self.device)
        peaks = torch.zeros(3, dtype=torch.float64, device=self.device)
        grad_norm = update_norm = 0.0
        num_skipped = 0
        self._set_learning_rate(plan)
        learning_rate = self.schedule.get_last_lr()[0]
        self.policy.train()
        largest, turns = LargestRatios(self.device), TrainedTurns()
        for number in range(plan.knobs["updates_per_step"]):
            in_update = [sequence for sequence in sequences if members[sequence.rollout_id].update == number]
            if not in_update:
                continue  # the step has fewer groups than updates
            sums = self.accumulate(in_update, members, plan.step - 1 if number == 0 else None, [largest, turns])
            totals += torch.tensor(sums.as_list(), dtype=torch.float64, device=self.device)
            peaks[:2] = torch.maximum(
                peaks[:2], torch.tensor([sums.peak_mismatch, sums.peak_noise], device=self.device)
            )
            learning_rate = float(self.schedule.get_last_lr()[0])
            norms = self._update()
            if not isfinite(norms.gradient):
                num_skipped += 1
                continue
            grad_norm = max(grad_norm, norms.gradient)
            update_norm = max(update_norm, norms.weights)
        dist.all_reduce(totals)
        peaks[2] = peak_memory_gib(self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        optimiser = {"learning_rate": float(learning_rate), "skipped_updates": float(num_skipped)}
        if grad_norm or not num_skipped:  # if no update was made there is no norm, and 0 would be one
            optimiser |= {"grad_norm": grad_norm, "update_norm": update_norm}
        metrics = token_metrics(totals.tolist()) | optimiser | peak_metrics(peaks.tolist())
        recorded = (largest.merged(), turns.gathered(self._waiting_group))
        return StepResult(finite_metrics(metrics | reward_metrics(plan.members)), num_skipped, *recorded)

    def accumulate(
        self,
        sequences: Sequence[TrainingSequence],
        members: dict[int, Member],
        fresh_step: int | None = None,
        recorders: Sequence[LargestRatios | TrainedTurns] = (),
    ) -> StepSums:
        """Accumulate the gradients of this rank's bins and return their sums; add their tokens to the recorders.

        Of ranks that share a bin, the first one counts and records it. Every rank runs the same number of passes, since
        FSDP's passes are collectives. `fresh_step`: policy step of the current weights; None once an update has changed
        them.
        """
        router_replay.require_same_experts(self.policy.model.config, sequences)
        bin_tokens = self.config.training.bin_tokens
        packing, dealt = deal_bins(sequences, self.num_groups, bin_tokens, self.packing, self.cost)
        sums = StepSums()
        for number in range(len(dealt[0])):  # rank 0 has a bin in every pass
            real = number < len(dealt[self.group])
            chains = dealt[self.group][number] if real else [spare_chain(sequences[0])]
            bin = pack_bin(chains, packing)
            counted = sums if real and self.is_first_of_group else None
            loss = self._bin_loss(bin, members, counted, fresh_step, recorders)
            # FSDP averages gradients over ranks, but the token weights are made for the sum over bins.
            torch.autograd.backward(loss * (self.num_groups if real else 0.0))
        return sums

    def _bin_loss(
        self,
        bin: Bin,
        members: dict[int, Member],
        sums: StepSums | None,
        fresh_step: int | None,
        recorders: Sequence[LargestRatios | TrainedTurns],
    ) -> Tensor:
        """Return the weighted loss of one bin, a scalar, and add its statistics to `sums` and its tokens to the
        recorders; without `sums` it is added to none of them."""
        inputs = make_inputs(bin, self.device, self.policy.sequence_ranks)
        logprobs_M, entropies_M = self.policy(inputs, bin.temperature)
        predictions_N = self._tensor(bin.predictions)
        rollouts, rollout_N = np.unique(bin.rollout_ids, return_inverse=True)
        values = [(members[int(rollout)].advantage, members[int(rollout)].weight) for rollout in rollouts]
        advantages_N, weights_N = self._tensor(np.array(values, dtype=np.float32)[rollout_N]).unbind(-1)
        turns_N = np.unique(bin.turn_ids, return_inverse=True)[1]
        tokens = TokenBatch(logprobs_M[predictions_N], self._tensor(bin.behaviour), advantages_N, self._tensor(turns_N))
        entropies_N = entropies_M[predictions_N]
        losses_N = self.config.loss.reward_factor * token_loss(tokens, self.config.loss)
        reference_kl_N = teacher_gaps_N = None
        if self.reference is not None:
            with torch.no_grad():
                reference_N = self.reference(inputs, bin.temperature).logprobs[predictions_N]
            reference_kl_N = kl_estimates(tokens.logprobs, reference_N, self._capped_ratios(tokens))
            losses_N = losses_N + self.config.loss.reference_kl * reference_kl_N
        if self.teacher is not None:
            with torch.no_grad():
                teacher_N = self.teacher(inputs, bin.temperature).logprobs[predictions_N]
            teacher_gaps_N = teacher_gaps(tokens.logprobs, teacher_N)
            distilled_N = teacher_losses(tokens.logprobs, teacher_gaps_N, self._capped_ratios(tokens))
            losses_N = losses_N + self.config.loss.distillation * distilled_N
        if self.config.loss.entropy_bonus:
            losses_N = losses_N - self.config.loss.entropy_bonus * entropies_N
        loss = (losses_N * weights_N).sum()
        if sums is not None:
            is_fresh_N = None if fresh_step is None else self._tensor(bin.policy_steps == fresh_step)
            sums.add(tokens, entropies_N, loss.detach(), self.config.loss, is_fresh_N)
            sums.add_frozen(reference_kl_N, teacher_gaps_N)
            if recorders:
                low, high = clip_masks(tokens, self.config.loss)
                for recorder in recorders:
                    recorder.add(bin, tokens, entropies_N, low | high)
            sums.chain_tokens += bin.num_chain_tokens
            sums.computed_tokens += bin.ids.size
            sums.flops += self.work.flops(bin.ids.size, len(bin.targets), bin.num_pairs)
        return loss

    def _capped_ratios(self, tokens: TokenBatch) -> Tensor:
        return tokens.ratios.clamp(max=self.config.loss.ratio_cap)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _set_learning_rate(self, plan: Plan) -> None:
        """Use the plan's learning rate, which may change while the run goes on; the warm-up stays as it is."""
        wanted = float(plan.knobs["learning_rate"])
        if self.schedule.base_lrs == [wanted] * len(self.schedule.base_lrs):
            return
        self.schedule.base_lrs = [wanted] * len(self.schedule.base_lrs)
        for group, factor in zip(self.optimiser.param_groups, self.schedule.lr_lambdas, strict=True):
            group["initial_lr"] = wanted
            group["lr"] = wanted * factor(self.schedule.last_epoch)
        self.schedule._last_lr = [group["lr"] for group in self.optimiser.param_groups]

    def _update(self) -> UpdateNorms:
        """Run one optimiser update. If the gradient is not finite, no weight changes."""
        value = clip_gradients(self.trained, self.config.training.max_grad_norm, self.num_copies)
        squared = torch.zeros((), dtype=torch.float64, device=self.device)
        if isfinite(value):
            self.optimiser.step()
            squared += adamw_update_norm(self.optimiser) / self.num_copies
            self.schedule.step()
        self.optimiser.zero_grad()
        dist.all_reduce(squared)
        return UpdateNorms(value, float(squared.sqrt()))

    def publish(self, directory: Path) -> list[JsonObject]:
        """Write the model in its own dtype, or its adapters, on rank 0 and return the files; other ranks return [].

        A collective. Tensors are cast before they are gathered, one at a time. The other ranks wait on gloo until the
        files are written, which may take longer than a collective on a GPU is given.
        """
        own = self.policy.state_dict()
        model = self.policy.model
        tensors = published_tensors(model, own, self.model_path) if self.adapter is None else lora.adapter_tensors(own)
        state: dict[str, Tensor] = {}
        for name, tensor in tensors:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                state[name] = whole.cpu()
        files = self._write(state, directory) if self.rank == 0 else []
        dist.barrier(group=self._waiting_group)
        return files

    def _write(self, state: Mapping[str, Tensor], directory: Path) -> list[JsonObject]:
        settings = self.config.training.lora
        model = self.policy.model
        if settings is None:
            tensors = model_files.as_in_files(model, state)
            return policy_files.publish_policy(tensors, self.model_path, directory, self.untouched)
        peft = lora.peft_config(settings, self.model_path)
        tensors = model_files.adapter_as_in_files(model, state)
        return policy_files.publish_adapter(tensors, peft, self.model_path, self.base_files, directory)

    def canary(self) -> JsonObject:
        """Score the canary text with the current weights. A collective of all ranks."""
        ids = canary.canary_ids(self.model_path)[: self.config.sampling.max_context_tokens - 1]  # the engine adds one
        bin = pack_bin([TrainingSequence.of_ids(ids)], self.packing)
        with torch.no_grad():
            logprobs, _ = self.policy(make_inputs(bin, self.device, self.policy.sequence_ranks), 1.0)
        return canary.canary_row(ids, logprobs.cpu().numpy())

    def save_async(self, uri: str) -> Future[Any]:
        """Save a checkpoint of the current state, written beside the next steps. A collective of all ranks."""
        return checkpoint.save_async(self.policy, self.optimiser, self.schedule, uri, self._save_group, self.adapter)

    def load(self, uri: str) -> None:
        """Load a checkpoint. A collective of all ranks. Raises ValueError or OSError."""
        checkpoint.load_checkpoint(self.policy, self.optimiser, self.schedule, uri, self.adapter)


def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float, num_copies: int = 1) -> float:
    """Clip the gradient of all sharded parameters together, in place, and return its L2 norm before. A collective.

    Experts may be sharded over another mesh than the other parameters, and torch's clipping takes those of one mesh;
    the norm of the shards, equal on every rank, needs no mesh. `num_copies`: of the weights among the ranks.
    """
    shards = [one.grad.to_local() for one in parameters if isinstance(one.grad, DTensor)]
    squared = get_total_norm(shards).double().square()
    dist.all_reduce(squared)
    norm = (squared / num_copies).sqrt()
    clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)
    return float(norm)


def published_tensors(model: Any, state: Mapping[str, Any], model_path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's tensors under the names of `model` and in the dtype of the directory, tied tensors once."""
    settings = model_files.read_settings(model_path)
    named = (settings.dtype, settings.get_text_config().dtype)
    dtype = next((one for one in named if isinstance(one, torch.dtype)), torch.float32)
    for name, tensor in state.items():
        own_name = name.removeprefix("model.")
        if isinstance(tensor, Tensor) and not (model.config.tie_word_embeddings and own_name == "lm_head.weight"):
            yield own_name, tensor.detach().to(dtype)


def export_checkpoint(model_path: Path, uri: str, directory: Path) -> None:
    """Write a checkpoint's weights, of any number of ranks, as a Hugging Face model directory; needs no process group.

    `model_path`: the run's initial model, whose config and tokenizer are copied. With LoRA it becomes a PEFT directory,
    which has its own files only and names that model as its base.
    """
    from ratchet.config import LoraConfig  # which needs pydantic

    model = model_files.load_causal_lm(model_path, torch.float32)
    policy = TrainablePolicy(model)
    adapter = checkpoint.read_adapter(uri)
    if adapter is not None:
        settings = LoraConfig.model_validate({name: json.loads(adapter)[name] for name in LoraConfig.model_fields})
        lora.add_adapters(model, settings)
        state = dict(lora.adapter_tensors(checkpoint.load_weights(policy, uri)))
        base = policy_files.weight_files(policy_files.describe_files(model_path))
        state = model_files.adapter_as_in_files(model, state)
        policy_files.publish_adapter(state, lora.peft_config(settings, model_path), model_path, base, directory)
        return
    tensors = dict(published_tensors(model, checkpoint.load_weights(policy, uri), model_path))
    untouched = policy_files.UntouchedTensors(model_path, model_files.untouched_names(model, model_path))
    policy_files.publish_policy(model_files.as_in_files(model, tensors), model_path, directory, untouched)
