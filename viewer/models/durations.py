"""The duration of a rollout in a list, and the stage that took most of it."""

from dataclasses import dataclass
from datetime import UTC, datetime

from reads.rollout_list import RolloutLine

_QUEUE = "queue"
"""The time from its row to the worker that claimed it; other stages have the names of `rollout.timings`."""
_WAITS = "waits between stages"
"""The rest: it waits for a box's slot, for a worker, or for the try after a failed one."""


@dataclass(slots=True, frozen=True)
class StageTime:
    name: str
    seconds: float


def took(line: RolloutLine) -> float:
    """Return the seconds from the rollout's creation to its end, or until now."""
    return ((line.ended_at or datetime.now(UTC)) - line.created_at).total_seconds()


def longest_stage(line: RolloutLine) -> StageTime | None:
    """Return the stage that took most of an ended rollout's time; None while it is open."""
    if line.ended_at is None:
        return None
    stages = {name: float(seconds) for name, seconds in line.timings.items()}
    if line.claimed_at is not None:
        stages[_QUEUE] = (line.claimed_at - line.created_at).total_seconds()
    stages[_WAITS] = took(line) - sum(stages.values())
    name = max(stages, key=lambda one: stages[one])
    return StageTime(name, stages[name])
