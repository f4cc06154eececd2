"""Rewards → advantages, over the rollouts of one group. Pure Python, no torch: the planner runs in a worker.

Why here: one reward and one advantage per rollout, whatever its number of chains; it stands undivided on every trained token.
Called by: `training/planner.py`.

mean           r - mean: Dr. GRPO, arXiv 2503.20783
std            (r - mean) / std: GRPO, arXiv 2402.03300
leave_one_out  r - mean of the others: RLOO, arXiv 2402.14740
batch          (r - mean) / std of all such differences in the step: REINFORCE++-baseline, arXiv 2501.03262; ScaleRL, arXiv 2510.13786
"""

import random
from collections.abc import Sequence
from math import isfinite
from statistics import fmean, pstdev

from ratchet.import_path import import_object

_EPSILON = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Equal rewards compare to nothing: every advantage would be 0."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


def advantages(rewards: Sequence[float], baseline: str, seed: str) -> list[float]:
    """One advantage per reward, in order.

    `shuffled` permutes the mean-centred advantages within the group by `seed`: a control that keeps every statistic and loses the
    verdicts' meaning. `batch` still has to be divided (`over_batch`). `module:function` is called with the list of rewards.
    """
    if ":" in baseline:
        return _own(rewards, baseline)
    mean = fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if baseline == "std":
        scale = pstdev(rewards) + _EPSILON
        return [value / scale for value in centred]
    if baseline == "leave_one_out":
        return [value * len(rewards) / (len(rewards) - 1) for value in centred]
    if baseline == "shuffled":
        random.Random(seed).shuffle(centred)
    return centred


def over_batch(values: Sequence[float]) -> list[float]:
    """The second half of `batch`: all the step's mean-centred rewards, divided by their common deviation. No group weighs more for being
    certain, as it does where each is divided by its own.
    """
    scale = pstdev(values) + _EPSILON
    return [value / scale for value in values]


def weigh_negative(value: float, weight: float) -> float:
    """Zhu et al. (arXiv 2506.01347) take positive and negative samples apart like this. The positive ones make a policy surer of what it
    does already; the negative ones keep it varied, and push a small one, in a few rollouts, off what it had learned before.
    """
    return value if value > 0 else value * weight


def _own(rewards: Sequence[float], path: str) -> list[float]:
    try:
        function = import_object(path)
    except ImportError as error:
        raise ValueError(f"training.advantage {path!r} cannot be imported: {error}") from None
    values = [float(value) for value in function(list(rewards))]
    if len(values) != len(rewards) or not all(map(isfinite, values)):
        raise ValueError(
            f"training.advantage {path}: returned {values} for the rewards {list(rewards)}; expected one finite number each"
        )
    return values
