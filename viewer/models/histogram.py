"""The rewards of a run as a histogram whose bins lead to their rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from reads.runs import RewardCount

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


def reward_bins(run_id: str, counts: Sequence[RewardCount]) -> list[RewardBin]:
    """Return one bin per reward if there are few different ones, else ten bins of equal width."""
    if not counts:
        return []
    if len(counts) <= _MAX_DISTINCT:
        ranges = [(one.reward, one.reward, one.number) for one in counts]
    else:
        lowest, width = counts[0].reward, (counts[-1].reward - counts[0].reward) / _NUM_BINS
        members: list[list[RewardCount]] = [[] for _ in range(_NUM_BINS)]
        for one in counts:
            members[min(_NUM_BINS - 1, int((one.reward - lowest) / width))].append(one)
        ranges = [(part[0].reward, part[-1].reward, sum(one.number for one in part)) for part in members if part]
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
