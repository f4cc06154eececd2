"""The part of a rollout's guard that limits its wall time: how long it has had boxes, outside of outages.

The sum of what its stages report is compared by the workflow before each further box; this limit also ends what hangs.
It is read from the ledger of boxes, so a workflow or a worker that dies loses nothing of it.
"""

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.box_lifecycle import guard_seconds
from activities.run_configs import RunConfigs
from ratchet.errors import GuardSpentError
from ratchet.payloads import StageInput
from ratchet.store import outages


async def seconds_left(connection: AsyncConnection, configs: RunConfigs, input: StageInput) -> float:
    """Return the rest of the guard in seconds of wall time with a box; negative if it is exceeded."""
    workflow_id = activity.info().workflow_id
    assert workflow_id is not None
    guard = guard_seconds(await configs.of_rollout(input.rollout_id), configs.settings)
    return guard - await outages.seconds_with_a_box(connection, input.rollout_id, workflow_id)


async def require_wall_time(
    connection: AsyncConnection, configs: RunConfigs, input: StageInput, grace_seconds: float = 0.0
) -> None:
    """Raise GuardSpentError if the guard is exceeded by more than the grace."""
    left = await seconds_left(connection, configs, input)
    if left < -grace_seconds:
        raise GuardSpentError(f"the rollout has had boxes for {-left:.0f} s more than its guard, outages not counted")
