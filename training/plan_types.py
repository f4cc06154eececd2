"""The input of a training step: a plan row and the chains that it names.

These types depend on neither the store nor the config parser, so that a machine with only torch and transformers can
run a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ratchet.routed_experts import RoutedExperts
from ratchet.types import JsonObject


@dataclass(slots=True, frozen=True)
class Member:
    """One rollout of a plan row.

    `num_tokens` is T_i: its trained tokens over all chains, after the staleness bound. `update`: number of the
    optimiser update that trains it, from 0. `weight`: what one of its trained tokens counts in that update's loss.
    `is_fork`: it began in the middle of another rollout.
    """

    rollout_id: int
    group_id: int
    grade_id: int | None
    reward: float
    advantage: float
    num_tokens: int
    update: int
    weight: float
    is_fork: bool = False


@dataclass(slots=True, frozen=True)
class Plan:
    """The plan of one step. `min_policy_step`: tokens sampled under older weights are not trained."""

    step: int
    members: list[Member]
    min_policy_step: int
    knobs: JsonObject
    seed: int


@dataclass(slots=True, frozen=True)
class TrainingSequence:
    """One chain, up to its last trained token. All arrays have shape (T,).

    `mask`: True if the token is trained; position 0 never is. `behaviour`: the logprob recorded when the token was
    sampled, 0 if it is not trained. `turn_ids`: the turn that each token came from. `temperature`: sampling temperature
    of every trained token. `policy_steps`: step of the weights that sampled the token, -1 for context; None if the age
    of the tokens is unknown. `experts`: those that the engine chose; None if the router is not replayed.
    """

    rollout_id: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int64]
    temperature: float
    policy_steps: npt.NDArray[np.int32] | None = None
    experts: RoutedExperts | None = None

    @classmethod
    def of_ids(cls, ids: Sequence[int], first: int = 1) -> Self:
        """Make one that is in no plan; every token from `first` on is trained."""
        zeros, mask = np.zeros(len(ids), np.int64), np.arange(len(ids)) >= first
        return cls(0, np.array(ids, np.int32), mask, zeros.astype(np.float32), zeros, 1.0)
