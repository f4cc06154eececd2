"""What the learner is given: a plan row and the chains that it names.

Why here: the arithmetic of a step knows these types alone, neither the store that they come from nor the config's parser; a machine with
torch and transformers and nothing else can take a step.
Called by: `training/planner.py` (makes them), and everything after it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, frozen=True)
class Member:
    """One rollout of a plan row. `num_tokens` is T_i: its trained tokens over all chains, after the staleness bound."""

    rollout_id: int
    group_id: int
    grade_id: int | None
    reward: float
    advantage: float
    num_tokens: int
    update: int
    weight: float


@dataclass(slots=True, frozen=True)
class Plan:
    """`min_policy_step`: tokens sampled under older weights get no loss weight."""

    step: int
    members: list[Member]
    min_policy_step: int
    knobs: dict[str, Any]
    seed: int

    @property
    def num_updates(self) -> int:
        return int(self.knobs["updates_per_step"])


@dataclass(slots=True, frozen=True)
class TrainingSequence:
    """One chain as the learner trains it. All arrays have shape (T,).

    `mask`: True where the token is trained. `behaviour`: its recorded logprob there, 0 elsewhere. Position 0 is never trained.
    `turn_ids`: the turn that each token came from. `temperature`: at which every trained token of the chain was sampled.
    `policy_steps`: of the weights that sampled it, -1 for context; None where nobody asks how old they were.
    """

    rollout_id: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int64]
    temperature: float
    policy_steps: npt.NDArray[np.int32] | None = None
