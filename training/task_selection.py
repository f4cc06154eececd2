"""Choose the tasks of the next groups by recent solve rates, if `training.solve_rates` is set. No torch.

A task that is always or never solved gives groups without signal: they cost rollouts and train nothing. Which tasks
these are changes as the policy learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class TaskRate:
    """A training task. `last_group_no`: its newest group, None before its first. `mean_reward`: over its recent groups.

    `mean_reward` is None if the task has no recent group. `position`: its place in the run's task order.
    """

    task_id: int
    label: str
    position: int
    last_group_no: int | None
    mean_reward: float | None


def choose_tasks(rates: Sequence[TaskRate], bounds: tuple[float, float], count: int) -> list[TaskRate]:
    """Return the next `count` tasks with a mean reward within `bounds`, longest-untried first, repeated if too few.

    A task without recent groups is included, so a task that was skipped for long enough is tried again. If every task
    is outside of the bounds, all tasks are used. Empty without tasks.
    """
    if not rates:
        return []
    low, high = bounds
    fit = [one for one in rates if one.mean_reward is None or low <= one.mean_reward <= high] or list(rates)
    waiting = sorted(fit, key=lambda one: (-1 if one.last_group_no is None else one.last_group_no, one.position))
    return [waiting[number % len(waiting)] for number in range(count)]
