"""Choose the tasks of the next groups by recent solve rates and by the datasets' weights, if these are set. No torch.

A task that is always or never solved gives groups without signal: they cost rollouts and train nothing. Which tasks
these are changes as the policy learns.
"""

from collections.abc import Mapping, Sequence

from store.tasks import RecentSolveRate


def choose_tasks(
    rates: Sequence[RecentSolveRate], bounds: tuple[float, float] | None, count: int
) -> list[RecentSolveRate]:
    """Return the next `count` tasks with a mean reward within `bounds`, longest-untried first, repeated if too few.

    A task without recent groups is included, so a task that was skipped for long enough is tried again. If every task
    is outside of the bounds, all tasks are used. Empty without tasks. `bounds` None: all tasks fit.
    """
    if not rates:
        return []
    low, high = bounds or (float("-inf"), float("inf"))
    fit = [one for one in rates if one.mean_reward is None or low <= one.mean_reward <= high] or list(rates)
    waiting = sorted(fit, key=lambda one: (-1 if one.last_group_no is None else one.last_group_no, one.position))
    return [waiting[number % len(waiting)] for number in range(count)]


def mix_datasets(
    rates: Sequence[RecentSolveRate],
    bounds: tuple[float, float] | None,
    count: int,
    weights: Mapping[int, float],
    recent: Mapping[int, int],
) -> list[RecentSolveRate]:
    """Return the next `count` tasks, so that the datasets' shares of groups approach their weights.

    `weights`: dataset number → weight. `recent`: dataset number → its groups among the newest; each next group is made
    from the dataset that is furthest behind, and within it from the task that `choose_tasks` names. A dataset without a
    task, because all are in quarantine, leaves its share to the others.
    """
    waiting = {
        number: choose_tasks([one for one in rates if one.dataset_no == number], bounds, count)
        for number, weight in weights.items()
        if weight > 0
    }
    waiting = {number: tasks for number, tasks in waiting.items() if tasks}
    made = {number: recent.get(number, 0) for number in waiting}
    chosen: list[RecentSolveRate] = []
    for _ in range(count if waiting else 0):
        number = min(made, key=lambda one: ((made[one] + 1) / weights[one], one))
        chosen.append(waiting[number][made[number] - recent.get(number, 0)])
        made[number] += 1
    return chosen
