"""Which tasks get the next groups: those whose rewards may still differ.

Why here: a group that is always or never solved costs rollouts and teaches nothing; which tasks those are changes while the policy learns.
Called by: `activities/run_lifecycle.py`, where a run sets `training.solve_rates`. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class TaskRate:
    """A training task. `last_group_no`: None where it had no group yet. `mean_reward`: over its recent groups, None without any."""

    task_id: int
    label: str
    position: int
    last_group_no: int | None
    mean_reward: float | None


def choose_tasks(rates: Sequence[TaskRate], bounds: tuple[float, float], count: int) -> list[TaskRate]:
    """The next `count`, longest-untried first; again from the front where there are fewer.

    `rates` are of recent groups only: a task that was passed over for so long that it has none left is tried again. Where every task lies
    outside of the bounds, all of them are taken: a run never waits for nothing.
    """
    low, high = bounds
    fit = [one for one in rates if one.mean_reward is None or low <= one.mean_reward <= high] or list(rates)
    waiting = sorted(fit, key=lambda one: (-1 if one.last_group_no is None else one.last_group_no, one.position))
    return [waiting[number % len(waiting)] for number in range(count)]
