"""The learner's record of a turn's trained tokens in a step, apart from learner and store, which both use it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Halves = npt.NDArray[np.float16]


@dataclass(slots=True, frozen=True)
class TrainedTurn:
    """The tokens of a turn at the chain positions [start, start + K), from the first to the last trained one.

    `entropies` (K,): nats, of the learner's distribution at the sampling temperature. `log_ratios` (K,): the learner's
    logprob minus the recorded one, in nats. Both are of the weights before the update that trains the token, and NaN
    for a token between trained ones that is not trained. float16: about three significant digits.
    """

    turn_id: int
    rollout_id: int
    start: int
    entropies: Halves
    log_ratios: Halves


@dataclass(slots=True, frozen=True)
class TrainedToken:
    """One trained token as the learner saw it. `position`: in its chain. `behaviour`: the recorded logprob.

    `logprob` and `entropy` (nats): of the learner, before the update that trains the token. `masked`: the loss gave it
    no gradient.
    """

    rollout_id: int
    turn_id: int
    position: int
    token_id: int
    behaviour: float
    logprob: float
    entropy: float
    masked: bool
