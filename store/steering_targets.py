"""Write what a person asks of one group or rollout: cancel it, or run it again, with the audit row.

A cancelled group is cancelled in the store first, so that no step takes it even if its workflow never hears of it. A
retried one is open in the store, and TrainRun starts the workflows of open groups. A rollout that is at work is
cancelled by its workflow alone, which writes the outcome.
"""

from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import OPEN_STATES, REWARDED_OUTCOMES, GroupState, Outcome, Purpose, RunState, SteeringAction, Wish
from store import evaluations, groups, names, open_runs, plans, runs, steering
from store.names import Kind
from store.schema import RolloutGroupTable, RolloutTable, RunTable
from store.steering import Request, SteeringAnswer


@dataclass(slots=True, frozen=True)
class Target:
    """A group, a rollout or an evaluation. `state`: of the group, the rollout's outcome, or `ended`; None while it is
    in flight. `id`: 0 for an evaluation, which has a label instead."""

    kind: Kind
    id: int
    run_id: str
    workflow_id: str
    purpose: str
    group_id: int | None
    state: str | None
    is_claimed: bool = True
    label: str = ""


async def find_target(connection: AsyncConnection, name: str) -> Target:
    """Return the rollout, group or evaluation with this name. Raises ConfigError if there is none."""
    named = await names.require_named(connection, name, Kind.GROUP, Kind.ROLLOUT, Kind.EVALUATION)
    of_run = (named.kind, named.id, named.run_id, named.name)
    if named.kind is Kind.EVALUATION:
        label = named.name.rpartition("/")[2]
        has_ended = label in await evaluations.ended_evaluations(connection, named.run_id)
        return Target(*of_run, Purpose.EVAL, None, "ended" if has_ended else None, label=label)
    if named.kind is Kind.GROUP:
        group = select(RolloutGroupTable.purpose, RolloutGroupTable.id, RolloutGroupTable.state)
        return Target(*of_run, *(await connection.execute(group.where(RolloutGroupTable.id == named.id))).one())
    is_claimed = RolloutTable.owner.is_not(None)
    rollout = select(RolloutTable.purpose, RolloutTable.group_id, RolloutTable.outcome, is_claimed)
    return Target(*of_run, *(await connection.execute(rollout.where(RolloutTable.id == named.id))).one())


async def record_cancel(connection: AsyncConnection, request: Request, target: Target) -> SteeringAnswer:
    """Cancel a group, or record that a rollout or an evaluation is cancelled; the caller then cancels its workflow."""
    next_step = await _lock_run(connection, request, target)
    if await steering.is_known(connection, request) or target.state == Outcome.CANCELLED:
        return SteeringAnswer(f"{target.workflow_id} was cancelled already", changed=False)
    if target.kind is Kind.GROUP:
        if not await groups.cancel_group(connection, target.id):  # `target.state` was read before the lock
            state = (await groups.get_group(connection, target.id)).state
            raise ConfigError(f"{target.workflow_id} is {state}; only an open or a ready group can be cancelled")
        text = f"{target.workflow_id} is cancelled; the run makes another group"
    else:
        if target.state is not None:
            raise ConfigError(f"{target.workflow_id} has ended ({target.state})")
        if target.kind is Kind.ROLLOUT and not target.is_claimed:
            raise ConfigError(f"{target.workflow_id} has not begun; cancel its group, or wait until it has")
        text = f"{target.workflow_id} is being cancelled"
        text += "; another rollout replaces it in its group" if target.group_id is not None else ""
    await steering.record(
        connection, request, SteeringAction.CANCEL, target.workflow_id, target.state, "cancelled", next_step
    )
    return SteeringAnswer(text)


async def record_retry(connection: AsyncConnection, request: Request, target: Target) -> SteeringAnswer:
    """Replace the members of a group, or one rollout, that ended without a verdict. Raises ConfigError."""
    next_step = await _lock_run(connection, request, target)
    if await steering.is_known(connection, request):
        return SteeringAnswer(f"{target.workflow_id} was retried by this request", changed=False)
    if target.kind is Kind.EVALUATION:
        return await _retry_evaluation(connection, request, target, next_step)
    if target.group_id is None:
        raise ConfigError(f"{target.workflow_id} was made by hand; `ratchet tasks run` makes another one of its task")
    if target.purpose != Purpose.TRAIN:
        label = (await groups.get_group(connection, target.group_id)).evaluation_label
        raise ConfigError(
            f"{target.workflow_id} belongs to an evaluation, which is retried as a whole: "
            f"`ratchet retry evaluate/{target.run_id}/{label}`"
        )
    if target.kind is Kind.ROLLOUT and target.state is None:
        raise ConfigError(f"{target.workflow_id} is in flight; `ratchet stop {target.id}` makes its group replace it")
    if target.state in REWARDED_OUTCOMES:
        raise ConfigError(
            f"{target.workflow_id} has a verdict; `ratchet tasks regrade {target.id}` judges its patch again"
        )
    run = await runs.get_run(connection, target.run_id)
    if run is None or run.state not in OPEN_STATES:
        raise ConfigError(f"run {target.run_id} has ended; `ratchet resume {target.run_id}` lets it go on")
    only = target.id if target.kind is Kind.ROLLOUT else None
    new = await groups.retry_members(connection, target.group_id, only)
    if not new:
        raise ConfigError(await _why_nothing_to_retry(connection, target))
    names = [member.workflow_id for member in new]
    await steering.record(connection, request, SteeringAction.RETRY, target.workflow_id, target.state, names, next_step)
    return SteeringAnswer(f"{target.workflow_id}: {', '.join(names)} run instead of what ended without a verdict")


async def _why_nothing_to_retry(connection: AsyncConnection, target: Target) -> str:
    assert target.group_id is not None
    group = await groups.get_group(connection, target.group_id)
    what = "it" if target.kind is Kind.GROUP else f"its group, group/{group.run_id}/{group.group_no},"
    match group.state:
        case GroupState.CANCELLED:
            reason = f"{what} is cancelled, and no step would train it; the run makes other groups by itself"
        case GroupState.OPEN | GroupState.FAILED if target.kind is Kind.GROUP:
            reason = "each member has a verdict, is in flight or is replaced"
        case GroupState.OPEN | GroupState.FAILED:
            reason = "another rollout has replaced it already"
        case _:
            reason = f"{what} has enough verdicts ({group.state}); `ratchet tasks regrade` judges its patches again"
    return f"{target.workflow_id} cannot be retried: {reason}"


async def _retry_evaluation(
    connection: AsyncConnection, request: Request, target: Target, next_step: int
) -> SteeringAnswer:
    """Run what has no verdict again, as long as the run's engines can serve the step that was evaluated.

    A run that has ended is opened for the evaluation, and trains no further step: it drains, with its step as the last.
    """
    run = await runs.the_run(connection, target.run_id)
    if target.state is None and run.state in OPEN_STATES:
        raise ConfigError(f"{target.workflow_id} has not ended; it replaces by itself what ends without a verdict")
    begun = {one.label: one for one in await evaluations.begun_evaluations(connection, target.run_id)}
    step = begun[target.label].step
    if step != run.step:
        raise ConfigError(
            f"{target.workflow_id} is of step {step}, and run {run.run_id} is at step {run.step}; "
            f"`ratchet evaluate {run.run_id}@{step}` evaluates that step when the run has ended"
        )
    waiting = await evaluations.reopen_evaluation(connection, target.run_id, target.label)
    if not waiting:
        raise ConfigError(
            f"{target.workflow_id} cannot be retried: every rollout has a verdict; `ratchet tasks regrade "
            f"{run.run_id}` judges the run's patches again"
        )
    text = f"{target.workflow_id}: {len(waiting)} rollouts without a verdict run again"
    if run.state not in OPEN_STATES:
        await open_runs.resume_run(connection, run.run_id, allow_done=True)
        if run.state != RunState.DONE:
            drained = update(RunTable).where(RunTable.run_id == run.run_id)
            await connection.execute(drained.values(wish=Wish.DRAIN, stop_at=run.step))
        text += f"; run {run.run_id}, which was {run.state}, is open until they have ended, and trains no further step"
    await steering.record(
        connection, request, SteeringAction.RETRY, target.workflow_id, target.state, len(waiting), next_step
    )
    return SteeringAnswer(text)


async def _lock_run(connection: AsyncConnection, request: Request, target: Target) -> int:
    """Lock the run's row, so that no step is planned meanwhile; return the first step that is not planned."""
    assert request.run_id == target.run_id
    await plans.lock_run_for_planning(connection, target.run_id)
    return await plans.newest_planned_step(connection, target.run_id) + 1
