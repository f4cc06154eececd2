"""The tasks of a run: how often each gave a step something to train, and what its rewards were."""

from dataclasses import dataclass

from sqlalchemy import Subquery, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import GroupState, Outcome, Purpose
from store.columns import columns_of
from store.schema import BatchItemTable, RolloutGroupTable, RolloutTable, TaskTable


@dataclass(slots=True, frozen=True)
class RunTask:
    """A task that training groups of the run were made of. `num_trained` and `num_untrained`: of its groups that a step
    consumed; `num_cancelled`: of its groups that were cancelled; `is_silent`: a group of it has ended, and none was
    trained. `lowest`, `mean`, `highest`: of the rewards, None without a verdict. `num_ended`: of its rollouts."""

    task_id: int
    label: str
    num_groups: int
    num_trained: int
    num_untrained: int
    num_cancelled: int
    is_silent: bool
    num_ended: int
    num_graded: int
    num_rejected: int
    lowest: float | None
    mean: float | None
    highest: float | None


async def count_tasks(connection: AsyncConnection, run_id: str) -> tuple[int, int]:
    """Return the number of tasks of the run's training groups, and of those that are silent."""
    groups = _groups_by_task(run_id)
    counted = select(func.count(), func.count().filter(groups.c.is_silent)).select_from(groups)
    number, num_silent = (await connection.execute(counted)).one()
    return number, num_silent


def _groups_by_task(run_id: str) -> Subquery:
    """Return the numbers of the run's training groups, one row per task."""
    trained = func.count().filter(BatchItemTable.use == "trained")
    waits = func.count().filter(RolloutGroupTable.state.in_((GroupState.OPEN, GroupState.READY)))
    return (
        select(
            RolloutGroupTable.task_id,
            func.count().label("num_groups"),
            trained.label("num_trained"),
            (func.count(BatchItemTable.use) - trained).label("num_untrained"),
            func.count().filter(RolloutGroupTable.state == GroupState.CANCELLED).label("num_cancelled"),
            ((trained == 0) & (waits < func.count())).label("is_silent"),
        )
        .outerjoin(
            BatchItemTable,
            (BatchItemTable.run_id == RolloutGroupTable.run_id) & (BatchItemTable.group_id == RolloutGroupTable.id),
        )
        .where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
        .group_by(RolloutGroupTable.task_id)
        .subquery()
    )


async def list_run_tasks(connection: AsyncConnection, run_id: str, limit: int) -> list[RunTask]:
    """Return the tasks of the run's training groups, those that gave least to train first."""
    groups = _groups_by_task(run_id)
    rewards = (
        select(
            RolloutTable.task_id,
            func.count(RolloutTable.outcome).label("num_ended"),
            func.count(RolloutTable.reward).label("num_graded"),
            func.count().filter(RolloutTable.outcome == Outcome.REJECTED).label("num_rejected"),
            func.min(RolloutTable.reward).label("lowest"),
            func.avg(RolloutTable.reward).label("mean"),
            func.max(RolloutTable.reward).label("highest"),
        )
        .where(RolloutTable.run_id == run_id, RolloutTable.purpose == Purpose.TRAIN)
        .group_by(RolloutTable.task_id)
        .subquery()
    )
    counts = {name: func.coalesce(rewards.c[name], 0) for name in ("num_ended", "num_graded", "num_rejected")}
    statement = (
        select(*columns_of(RunTask, TaskTable, **{**rewards.c, **groups.c, **counts}))
        .join(groups, groups.c.task_id == TaskTable.id)
        .outerjoin(rewards, rewards.c.task_id == TaskTable.id)
        .order_by(groups.c.num_trained, groups.c.num_untrained.desc(), TaskTable.id)
        .limit(limit)
    )
    return [RunTask(*row) for row in await connection.execute(statement)]
