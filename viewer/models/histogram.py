"""The rewards of a run as a histogram whose bins lead to their rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

_NUM_BINS = 10
_MAX_DISTINCT = 12


@dataclass(slots=True, frozen=True)
class RewardBin:
    """Rewards from `low` to `high`, both inclusive. `share`: of the fullest bin."""

    low: float
    high: float
    number: int
    share: float
    link: str


def reward_bins(run_id: str, counts: Mapping[float, int]) -> list[RewardBin]:
    """Return one bin per reward if there are few different ones, else ten bins of equal width.

    `counts`: reward → number, the lowest first."""
    if not counts:
        return []
    if len(counts) <= _MAX_DISTINCT:
        ranges = [(reward, reward, number) for reward, number in counts.items()]
    else:
        lowest, width = min(counts), (max(counts) - min(counts)) / _NUM_BINS
        members: list[list[float]] = [[] for _ in range(_NUM_BINS)]
        for reward in counts:
            members[min(_NUM_BINS - 1, int((reward - lowest) / width))].append(reward)
        ranges = [(part[0], part[-1], sum(counts[one] for one in part)) for part in members if part]
    fullest = max(number for _, _, number in ranges)
    return [
        RewardBin(
            low,
            high,
            number,
            number / fullest,
            f"/rollouts?run={quote(run_id)}&purpose=train&reward_from={low!r}&reward_to={high!r}",
        )
        for low, high, number in ranges
    ]
