"""Pause runs. Every pause is one of these two statements; `store.open_runs.resume_run` is its opposite."""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import RunState
from store.runs import ADHOC
from store.schema import RunTable


async def pause_run(connection: AsyncConnection, run_id: str, reason: str, epoch: int | None = None) -> None:
    """Move the run from `running` to `paused` with the reason, until a person resumes it. Its batches stay as they are.

    `epoch` fences the write of a learner: nothing happens if another learner has taken over the run. None is for the
    planner, which holds no lease. Nothing happens if the run is not running.
    """
    statement = update(RunTable).where(RunTable.run_id == run_id, RunTable.state == RunState.RUNNING)
    if epoch is not None:
        statement = statement.where(RunTable.epoch == epoch)
    await connection.execute(statement.values(state=RunState.PAUSED, state_reason=reason))


async def pause_all_runs(
    connection: AsyncConnection, reason: str, only_with_rollouts: bool, engine_set: str | None = None
) -> None:
    """Pause every running training run, because a part that they need does not work.

    `only_with_rollouts`: not those that train on stored rollouts. `engine_set`: only those of this set.
    """
    statement = update(RunTable).where(RunTable.state == RunState.RUNNING, RunTable.config_name != ADHOC)
    if only_with_rollouts:
        statement = statement.where(RunTable.source_run_id.is_(None))
    if engine_set is not None:
        statement = statement.where(RunTable.engine_set == engine_set)
    await connection.execute(statement.values(state=RunState.PAUSED, state_reason=reason))
