"""Write what a person asks of one group or rollout: cancel it, or run it again, with the audit row.

A cancelled group is cancelled in the store first, so that no step takes it even if its workflow never hears of it. A
retried one is open in the store, and TrainRun starts the workflows of open groups. A rollout that is at work is
cancelled by its workflow alone, which writes the outcome.
"""

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.store import groups, plans, runs, steering
from ratchet.store.schema import RolloutGroupTable, RolloutTable
from ratchet.store.steering import Answer, Request
from ratchet.types import REWARDED_OUTCOMES, GroupState, Purpose, RunState, SteeringAction


class TargetKind(StrEnum):
    """What a request is about."""

    GROUP = "group"
    ROLLOUT = "rollout"


@dataclass(slots=True, frozen=True)
class Target:
    """A group or a rollout. `state`: of the group, or the rollout's outcome; None while it is in flight."""

    kind: TargetKind
    id: int
    run_id: str
    workflow_id: str
    purpose: str
    group_id: int | None
    state: str | None
    is_claimed: bool = True


async def find_target(connection: AsyncConnection, name: str) -> Target:
    """Return the rollout with this id or workflow id, or the group with this workflow id. Raises ConfigError."""
    if name.startswith("group/"):
        group = select(
            RolloutGroupTable.id, RolloutGroupTable.run_id, RolloutGroupTable.purpose, RolloutGroupTable.state
        ).where(RolloutGroupTable.workflow_id == name)
        found = (await connection.execute(group)).one_or_none()
        if found is not None:
            return Target(TargetKind.GROUP, found.id, found.run_id, name, found.purpose, found.id, found.state)
    else:
        rollout = select(
            RolloutTable.id,
            RolloutTable.run_id,
            RolloutTable.workflow_id,
            RolloutTable.purpose,
            RolloutTable.group_id,
            RolloutTable.outcome,
            RolloutTable.owner.is_not(None).label("is_claimed"),
        ).where(RolloutTable.id == int(name) if name.isdigit() else RolloutTable.workflow_id == name)
        row = (await connection.execute(rollout)).one_or_none()
        if row is not None:
            return Target(TargetKind.ROLLOUT, *row)
    raise ConfigError(
        f"there is no group or rollout {name!r}; name a rollout by its number in `ratchet rollouts`, or a workflow, "
        "such as group/RUN/3 or rollout/RUN/3/0"
    )


async def cancel(connection: AsyncConnection, request: Request, target: Target) -> Answer:
    """Cancel a group, or record that a rollout is cancelled; the caller then cancels its workflow."""
    run = await _lock_run(connection, request, target)
    if target.kind is TargetKind.GROUP:
        if target.state == GroupState.CANCELLED:
            return Answer(f"{target.workflow_id} is cancelled already", changed=False)
        if target.state not in (GroupState.OPEN, GroupState.READY):
            raise ConfigError(f"{target.workflow_id} is {target.state}; only an open or a ready group can be cancelled")
        await groups.cancel_group(connection, target.id)
        text = f"{target.workflow_id} is cancelled; the run makes another group"
    else:
        if target.state is not None:
            raise ConfigError(f"{target.workflow_id} has ended ({target.state})")
        if not target.is_claimed:
            raise ConfigError(f"{target.workflow_id} has not begun; cancel its group, or wait until it has")
        text = f"{target.workflow_id} is being cancelled"
        text += "; another rollout replaces it in its group" if target.group_id is not None else ""
    await steering.record(
        connection, request, SteeringAction.CANCEL, target.workflow_id, target.state, "cancelled", run
    )
    return Answer(text)


async def retry(connection: AsyncConnection, request: Request, target: Target) -> Answer:
    """Replace the members of a group, or one rollout, that ended without a verdict. Raises ConfigError."""
    next_step = await _lock_run(connection, request, target)
    if target.purpose != Purpose.TRAIN or target.group_id is None:
        raise ConfigError(
            f"{target.workflow_id} is no training rollout; `ratchet evaluate` and `ratchet rollout` run such again"
        )
    if target.kind is TargetKind.ROLLOUT and target.state is None:
        raise ConfigError(f"{target.workflow_id} is in flight; `ratchet cancel {target.id}` makes its group replace it")
    if target.state in REWARDED_OUTCOMES:
        raise ConfigError(f"{target.workflow_id} has a verdict; `ratchet regrade {target.id}` judges its patch again")
    run = await runs.get_run(connection, target.run_id)
    if run is None or run.state not in (RunState.RUNNING, RunState.PAUSED):
        raise ConfigError(f"run {target.run_id} has ended; `ratchet resume {target.run_id}` lets it go on")
    only = target.id if target.kind is TargetKind.ROLLOUT else None
    new = await groups.retry_members(connection, target.group_id, only)
    if not new:
        return Answer(
            f"{target.workflow_id}: nothing to retry, because each member has a verdict, is in flight or is replaced",
            changed=False,
        )
    names = [member.workflow_id for member in new]
    await steering.record(connection, request, SteeringAction.RETRY, target.workflow_id, target.state, names, next_step)
    return Answer(f"{target.workflow_id}: {', '.join(names)} run instead of what ended without a verdict")


async def _lock_run(connection: AsyncConnection, request: Request, target: Target) -> int:
    """Lock the run's row, so that no step is planned meanwhile; return the first step that is not planned."""
    assert request.run_id == target.run_id
    await plans.lock_run_for_planning(connection, target.run_id)
    return await plans.newest_planned_step(connection, target.run_id) + 1
