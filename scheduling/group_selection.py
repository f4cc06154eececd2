"""Decide how many groups may start, when enough are ready for a step, and when a run that finds none is paused.

A run must neither wait for ever nor sample groups that no step could train. The SQL is in
`store/training_groups.py`; this file holds the rules. No torch.
"""

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig, TrainingConfig
from ratchet.types import GroupState, Wish
from scheduling.signal import gives_gradient
from store import groups, plans, training_groups
from store.open_runs import pause_run
from store.runs import RunRow

_PATIENCE = 4
"""A run is paused after this many times `max_groups_seen` groups that gave no step."""


def groups_to_start(
    training: TrainingConfig, published: int, planned: int, num_open: int, num_ready: int, num_seen: int
) -> int:
    """Return how many groups may start now.

    A group that starts under version `published` can be trained up to step `published + 1 + max_staleness`. The steps
    after `planned` up to that one take `groups_per_step` groups each; starting more would sample groups that are too
    old for every step that could still take them. `num_seen`: groups consumed without being trained while waiting for
    the next step. They count against `max_groups_seen`; beyond it, only as many start as `min_groups` still needs.
    """
    num_steps = min(published + 1 + training.max_staleness, training.steps) - planned
    num_held = num_open + num_ready
    room = num_steps * training.groups_per_step - num_held
    unseen = num_steps * max_groups_seen(training) - num_seen - num_held
    if num_open == 0:
        unseen = max(unseen, training.min_groups - num_ready)
    return max(0, min(room, unseen))


def groups_with_room(num_open_rollouts: int, max_open_rollouts: int, group_size: int) -> int:
    """Return how many groups may be open in addition, by the rollouts that may be.

    Rounded up, so that a group is opened before the last rollouts of the others end.
    """
    return max(0, -(-(max_open_rollouts - num_open_rollouts) // group_size))


async def config_in_force(connection: AsyncConnection, run: RunRow) -> RunConfig:
    """Return the config by which the run's next step is planned.

    The last step of a run that drains takes what is left, from `min_groups` groups on, once no group is open.
    """
    config = run.resolved_config
    if run.wish != Wish.DRAIN or await groups.count_groups_in_state(connection, run.run_id, GroupState.OPEN):
        return config
    training = config.training.model_copy(update={"max_groups_seen": 1})
    return config.model_copy(update={"training": training})


def max_groups_seen(training: TrainingConfig) -> int:
    """Return `training.max_groups_seen`, or its default of twice `groups_per_step`."""
    return training.max_groups_seen or 2 * training.groups_per_step


def has_enough_groups(num_useful: int, num_consumed: int, training: TrainingConfig) -> bool:
    """Decide whether a step can be planned with `num_useful` groups after `num_consumed` groups without use.

    A full step is `groups_per_step` groups. A smaller step, of at least `min_groups`, is accepted once
    `max_groups_seen` groups were seen for it.
    """
    if num_useful >= training.groups_per_step:
        return True
    return num_consumed + num_useful >= max_groups_seen(training) and num_useful >= training.min_groups


async def plannable(connection: AsyncConnection, run_id: str, config: RunConfig) -> bool:
    """Return whether `plan_step` should run: a planned step is not trained, or enough groups are ready for the next.

    Staleness is not checked here. If it leaves too few groups, `plan_step` consumes the expired ones and returns None.
    """
    training = config.training
    if await plans.unfinished_step(connection, run_id) is not None:
        return True
    step = await plans.newest_planned_step(connection, run_id) + 1
    if step > training.steps:
        return False
    ready = await training_groups.ready_groups(connection, run_id, training.truncated)
    num_useful = sum(gives_gradient(group.rewards, config) for group in ready)
    num_consumed = await training_groups.count_consumed_groups(connection, run_id, step)
    return has_enough_groups(num_useful, num_consumed, training)


async def consume_without_signal(connection: AsyncConnection, run_id: str, config: RunConfig) -> None:
    """Consume ready groups that give no gradient, as `no_signal`; they make room for others.

    Pauses the run with the reason if it finds no other groups for too long: it would sample for ever without learning.
    """
    training = config.training
    await plans.lock_run_for_planning(connection, run_id)
    ready = await training_groups.ready_groups(connection, run_id, training.truncated, lock=True)
    without_signal = [group.group_id for group in ready if not gives_gradient(group.rewards, config)]
    step = await plans.newest_planned_step(connection, run_id) + 1
    await training_groups.consume_ready_groups(connection, run_id, without_signal, step, "no_signal")
    if len(ready) - len(without_signal) >= training.min_groups:
        return
    count = await training_groups.count_consumed_since_resume(connection, run_id, step)
    if count < _PATIENCE * max_groups_seen(training):
        return
    reason = (
        f"{count} groups in a row gave no step {step}: the rewards within each were equal, or its tokens too old. "
        "Look at `ratchet show rollouts`; other tasks, another temperature or a start from an earlier step (init_from) "
        "may help"
    )
    await pause_run(connection, run_id, reason)


async def pause_if_all_fail(connection: AsyncConnection, run_id: str, training: TrainingConfig) -> None:
    """Pause a run if `max_groups_seen` groups in a row failed, with the most frequent reason.

    Each failure makes room for the next group, so that a broken grader would otherwise keep agents running for ever.
    """
    failed = await training_groups.failed_groups_in_a_row(connection, run_id, max_groups_seen(training))
    if failed is None:
        return
    reason = f"most often {failed.commonest_reason}" if failed.commonest_reason else "their rollouts were cancelled"
    await pause_run(connection, run_id, f"{failed.count} groups in a row got too few verdicts, {reason}")
