"""The guard of a rollout: for how long it may have boxes, outages and waits for us not counted.

The time is read from the ledger of boxes, so a workflow or a worker that dies loses nothing of it. It decides on
further boxes and ends an agent; it never decides a verdict.
"""

from asyncio import sleep

from temporalio import activity

from ratchet.errors import GuardSpentError
from ratchet.payloads import StageInput
from store import outages
from store.database import Database


async def require_wall_time(
    database: Database, input: StageInput, guard_seconds: float, grace_seconds: float = 0.0
) -> float:
    """Return the rest of the guard in seconds of wall time with a box; it is negative within the grace.

    `guard_seconds`: the limit (`box_lifecycle.guard_seconds`). Raises GuardSpentError if the guard is exceeded
    by more than the grace. An outage of Postgres is written only after it, so a guard that seems exceeded is read again
    once the watcher has had the time to write. The caller sends heartbeats meanwhile, and holds no transaction.
    """
    left = await _seconds_left(database, input, guard_seconds)
    if left <= 0:
        await sleep(2 * outages.RECORD_SECONDS)
        left = await _seconds_left(database, input, guard_seconds)
    if left < -grace_seconds:
        raise GuardSpentError(f"the rollout has had boxes for {-left:.0f} s more than its guard, outages not counted")
    return left


async def _seconds_left(database: Database, input: StageInput, guard_seconds: float) -> float:
    workflow_id = activity.info().workflow_id
    assert workflow_id is not None
    return guard_seconds - await database.read(outages.seconds_with_a_box, input.rollout_id, workflow_id)
