"""Compute advantages from the rewards of one group. Pure Python, no torch: planning runs in an activity worker.

Each rollout has one reward and one advantage, for any number of chains; every trained token gets it undivided.

mean           r - mean: Dr. GRPO, arXiv 2503.20783
std            (r - mean) / std: GRPO, arXiv 2402.03300
leave_one_out  r - mean of the others: RLOO, arXiv 2402.14740
batch          (r - mean) / std of all such differences in the step: REINFORCE++-baseline, arXiv 2501.03262;
               ScaleRL, arXiv 2510.13786
shuffled       the advantages of `mean`, permuted within the group: a control in which rewards carry no information
"""

import random
from collections.abc import Sequence
from math import isfinite
from statistics import fmean, pstdev

from ratchet.import_path import import_function

_EPSILON = 1e-6


def advantages(rewards: Sequence[float], baseline: str, seed: str) -> list[float]:
    """Return one advantage per reward, in order.

    `baseline` is a name of the table above, or `module:function`, which is called with the list of rewards. `batch` is
    only centred here; `over_batch` divides it. `seed` fixes the permutation of `shuffled`. Raises ConfigError if the
    function cannot be imported, ValueError if it does not return one finite number per reward.
    """
    if ":" in baseline:
        return _custom_advantages(rewards, baseline)
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
    """Divide all mean-centred rewards of the step by their common standard deviation: the second half of `batch`.

    Dividing each group by its own deviation gives groups with little variance more weight; this does not.
    """
    scale = pstdev(values) + _EPSILON
    return [value / scale for value in values]


def weigh_negative(value: float, weight: float) -> float:
    """Multiply a negative advantage by `weight` (Zhu et al., arXiv 2506.01347).

    Positive samples sharpen the policy. Negative samples keep its entropy, but with few rollouts they can make a small
    policy forget what it had learned.
    """
    return value if value > 0 else value * weight


def _custom_advantages(rewards: Sequence[float], path: str) -> list[float]:
    values = [float(value) for value in import_function("training.advantage", path)(list(rewards))]
    if len(values) != len(rewards) or not all(map(isfinite, values)):
        raise ValueError(
            f"training.advantage {path}: returned {values} for the rewards {list(rewards)}; "
            "expected one finite number each"
        )
    return values
