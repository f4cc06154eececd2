"""Rollouts as turns, cut into chains in different ways, and the gradient that a learner computes for them.

The invariance test runs it in its own process and, by `run_rank`, in two ranks.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ratchet.config import RunConfig
from ratchet.token_statistics import TrainedToken, TrainedTurn
from training.plan_builder import reducer_weights
from training.plan_types import Member, Plan, TrainingSequence

if TYPE_CHECKING:
    from training.learner import RankLearner

NUM_IDS = 300


def make_config(
    bin_tokens: int = 256, temperature: float = 1.0, preset: str = "icepop", packing: str = "auto", **training: object
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "datasets": [{"path": "unused.jsonl"}],
            "sampling": {"max_response_tokens": 32, "max_context_tokens": 64, "temperature": temperature},
            "loss": {"preset": preset},
            "training": {"bin_tokens": bin_tokens, "learning_rate": 1e-3, "packing": packing, **training},
        }
    )


@dataclass(frozen=True)
class Turns:
    """One rollout: its whole token stream, and (start, end) of each sampled turn in it."""

    rollout_id: int
    ids: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    spans: list[tuple[int, int]]
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    def chains(self, cuts: Sequence[bool]) -> list[TrainingSequence]:
        """Cut the rollout into chains: one ends after every turn whose cut is True, and after the last turn.

        A chain trains the turns since the end of the chain before.
        """
        chains, mask = [], np.zeros(len(self.ids), dtype=np.bool_)
        for number, (start, end) in enumerate(self.spans):
            mask[start:end] = True
            if number == len(self.spans) - 1 or cuts[number % len(cuts)]:
                behaviour = np.where(mask, self.behaviour, np.float32(0))[:end]
                turns = 100 * self.rollout_id + np.searchsorted(
                    [end for _, end in self.spans], np.arange(end), side="right"
                )
                chains.append(
                    TrainingSequence(self.rollout_id, self.ids[:end], mask[:end], behaviour, turns, self.temperature)
                )
                mask = np.zeros(len(self.ids), dtype=np.bool_)
        return chains


def make_rollouts(seed: int, count: int = 4, temperature: float = 1.0) -> list[Turns]:
    random = np.random.default_rng(seed)
    rollouts = []
    for rollout_id in range(count):
        spans, at = [], 4
        for _ in range(int(random.integers(1, 5))):
            length = int(random.integers(1, 9))
            spans.append((at, at + length))
            at += length + int(random.integers(0, 4))
        ids = random.integers(0, NUM_IDS, spans[-1][1]).astype(np.int32)
        behaviour = (-6.4 + 0.3 * random.standard_normal(len(ids))).astype(np.float32)
        rollouts.append(Turns(rollout_id, ids, behaviour, spans, temperature))
    return rollouts


def make_relatives(seed: int, count: int = 6) -> list[Turns]:
    """Make rollouts with common prefixes: each continues an earlier one from one of its turns.

    The shared tokens are sampled by both, with logprobs of their own. Neighbours have opposite advantages
    (`make_plan`).
    """
    random = np.random.default_rng(seed)
    family = make_rollouts(seed, count)
    for number in range(1, count):
        other, mine = family[int(random.integers(0, number))], family[number]
        cut = other.spans[int(random.integers(0, len(other.spans)))][1] - int(random.integers(0, 3))
        ids = np.concatenate([other.ids[:cut], mine.ids[:20]])
        spans = [(start, min(end, cut)) for start, end in other.spans if start < cut] + [
            (cut, cut + 2),
            (cut + 3, len(ids)),
        ]
        behaviour = (-6.4 + 0.3 * random.standard_normal(len(ids))).astype(np.float32)
        family[number] = Turns(number, ids, behaviour, spans)
    return family


def make_plan(rollouts: Sequence[Turns], reducer: str) -> Plan:
    group_of = {one.rollout_id: one.rollout_id // 2 for one in rollouts}
    weights = reducer_weights(reducer, {one.rollout_id: one.num_tokens for one in rollouts}, group_of, 50)
    members = [
        Member(
            one.rollout_id,
            group_of[one.rollout_id],
            None,
            0.0,
            0.5 - one.rollout_id % 2,
            one.num_tokens,
            0,
            weights[one.rollout_id],
        )
        for one in rollouts
    ]
    return Plan(1, members, 0, {"updates_per_step": 1, "learning_rate": 1e-3}, 0)


def gradient(
    model: Path, config: RunConfig, plan: Plan, sequences: Sequence[TrainingSequence]
) -> npt.NDArray[np.float32]:
    """Return the gradient of the whole model, flat, before an update. Needs a process group; a collective."""
    from training.learner import RankLearner

    learner = RankLearner(model, config)
    learner.accumulate(sequences, {member.rollout_id: member for member in plan.members})
    return accumulated(learner)


def accumulated(learner: "RankLearner") -> npt.NDArray[np.float32]:
    """Return the gradient that a learner has accumulated, flat. A collective."""
    from torch.distributed.tensor import DTensor

    parts = []
    for parameter in learner.policy.parameters():
        assert isinstance(parameter.grad, DTensor)
        parts.append(parameter.grad.full_tensor().flatten().numpy())
    return np.concatenate(parts)


@dataclass(frozen=True)
class StepOutcome:
    """The gradient of a step's sequences, their tokens with the largest ratios, and the step's record of its tokens."""

    gradient: npt.NDArray[np.float32]
    largest_ratios: list[TrainedToken]
    trained_turns: list[TrainedTurn]


def step_outcome(model: Path, config: RunConfig, plan: Plan, sequences: Sequence[TrainingSequence]) -> StepOutcome:
    """Train one step of a new learner. Needs a process group; a collective."""
    from training.learner import RankLearner
    from training.token_statistics import LargestRatios

    learner = RankLearner(model, config)
    largest = LargestRatios(learner.device)
    learner.accumulate(sequences, {member.rollout_id: member for member in plan.members}, None, [largest])
    before = accumulated(learner)
    learner.optimiser.zero_grad()
    return StepOutcome(before, largest.merged(), list(learner.step(plan, sequences).trained_turns))


def largest_ratios(
    model: Path, config: RunConfig, plan: Plan, sequences: Sequence[TrainingSequence]
) -> list[TrainedToken]:
    """Return the step's tokens with the largest ratios. Needs a process group; a collective."""
    from training.learner import RankLearner
    from training.token_statistics import LargestRatios

    learner = RankLearner(model, config)
    largest = LargestRatios(learner.device)
    learner.accumulate(sequences, {member.rollout_id: member for member in plan.members}, None, [largest])
    return largest.merged()


def trained_turns(
    model: Path, config: RunConfig, plan: Plan, sequences: Sequence[TrainingSequence]
) -> list[TrainedTurn]:
    """Return what a step records of its trained tokens, on rank 0. Needs a process group; a collective."""
    from training.learner import RankLearner

    return list(RankLearner(model, config).step(plan, sequences).trained_turns)


def _only_rank_zero_reads(*_arguments: object, **_options: object) -> None:
    raise AssertionError("a rank other than 0 has read the whole model")


def run_rank(meeting: Path, number: int, world_size: int, request: Path, answer: Path) -> None:
    """Run one rank's process."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    if number:
        AutoModelForCausalLM.from_pretrained = _only_rank_zero_reads
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world_size)
    asked = pickle.loads(request.read_bytes())
    found = [step_outcome(*case) for case in asked]
    if number == 0:
        answer.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_adapter_rank(meeting: Path, number: int, world_size: int, request: Path, answer: Path) -> None:
    """Run one rank's process: the gradients of learners with adapters, from a checkpoint, under PEFT's names."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world_size)
    found = [adapter_gradients(*case) for case in pickle.loads(request.read_bytes())]
    if number == 0:
        answer.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def adapter_gradients(
    model: Path, config: RunConfig, plan: Plan, sequences: Sequence[TrainingSequence], checkpoint: str
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the gradients of a learner with adapters, from a checkpoint, under PEFT's names. A collective."""
    from training import lora
    from training.learner import RankLearner

    learner = RankLearner(model, config)
    learner.load(checkpoint)
    learner.accumulate(sequences, {member.rollout_id: member for member in plan.members})
    gradients = {
        name: one.grad.full_tensor()  # type: ignore[union-attr]
        for name, one in learner.policy.named_parameters()
        if one.requires_grad
    }
    return {name: one.numpy() for name, one in lora.adapter_tensors(gradients)}
