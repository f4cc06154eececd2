"""The beginning and end of an ended rollout and its attempts, for their spans in a trace."""

from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

from sqlalchemy import null, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.columns import columns_of
from store.schema import AttemptTable, PatchTable, RolloutTable, TaskTable


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """An attempt: from its boot's first try until its patch was stored, the next attempt began or the rollout ended."""

    number: int
    began_at: datetime
    ended_at: datetime
    agent_exit: str | None


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """`began_at`: when its row was made, from which on it may have waited for a worker."""

    run_id: str
    workflow_id: str
    task: str
    harness: str
    policy_version: str | None
    outcome: str
    reward: float | None
    num_turns: int
    num_trained_tokens: int
    began_at: datetime
    claimed_at: datetime | None
    ended_at: datetime
    attempts: tuple[AttemptTimes, ...]


async def read_ended_rollout(connection: AsyncConnection, rollout_id: int) -> EndedRollout | None:
    """Return the rollout's times; None if it has not ended."""
    columns = columns_of(
        EndedRollout, RolloutTable, task=TaskTable.label, began_at=RolloutTable.created_at, attempts=null()
    )
    found = select(*columns).join(TaskTable, TaskTable.id == RolloutTable.task_id)
    rollout = EndedRollout(*(await connection.execute(found.where(RolloutTable.id == rollout_id))).one())
    if rollout.outcome is None or rollout.ended_at is None:
        return None
    attempts = select(AttemptTable.n, AttemptTable.created_at, AttemptTable.agent_exit)
    attempts = attempts.where(AttemptTable.rollout_id == rollout_id).order_by(AttemptTable.n)
    patches = select(PatchTable.attempt, PatchTable.created_at).where(PatchTable.rollout_id == rollout_id)
    stored_at = {patch.attempt: patch.created_at for patch in await connection.execute(patches)}
    rows = list(await connection.execute(attempts))
    ends = [*(later.created_at for _, later in pairwise(rows)), rollout.ended_at]
    times = (
        AttemptTimes(one.n, one.created_at, stored_at.get(one.n, end), one.agent_exit)
        for one, end in zip(rows, ends, strict=False)  # without an attempt there is still the end of the rollout
    )
    return replace(rollout, attempts=tuple(times))
