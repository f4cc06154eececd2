"""Steer a run, a group, a rollout or a stage: write the request to the store, then tell the workflows.

`ratchet` and the updates of TrainRun both come here. The store is written first: what Temporal then does not hear is
found by TrainRun at its next look, and a repeated request changes nothing.
"""

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetActivityRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.run_checks import check_boxes
from ratchet.errors import ConfigError, TemporalUnavailableError
from ratchet.steering_payloads import SteerRunInput
from ratchet.temporal_client import describe_workflow
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import SteeringAction
from store import plans, steering, steering_targets
from store.database import Database
from store.steering import Request, SteeringAnswer
from store.steering_targets import Target


async def apply_to_run(database: Database, settings: TemporalSettings, input: SteerRunInput) -> SteeringAnswer:
    """Record what a person asks of a run. Raises ConfigError with the reason of a refusal."""
    request = Request(input.run_id, input.request_id, input.by, input.reason)
    async with database.begin() as connection:
        match input.action:
            case SteeringAction.SET:
                check_boxes(await steering.changed_by(connection, input.run_id, input.changes), settings)
                return await steering.record_changes(connection, request, input.changes)
            case SteeringAction.EXTEND:
                return await steering.record_extension(connection, request, input.steps)
            case SteeringAction.SKIP_STEP:
                return await steering.record_skipped_step(connection, request)
            case _:
                return await steering.CHANGES_OF_STATE[input.action](connection, request)


async def apply_to_target(
    database: Database, client: Client, action: SteeringAction, what: str, request_id: str, by: str, reason: str
) -> SteeringAnswer:
    """Cancel or retry a group or rollout. Raises ConfigError if refused, TemporalUnavailableError if it is not told."""
    async with database.begin() as connection:
        target = await steering_targets.find_target(connection, what)
        request = Request(target.run_id, request_id, by, reason)
        if action is SteeringAction.RETRY:
            return await steering_targets.record_retry(connection, request, target)
        answer = await steering_targets.record_cancel(connection, request, target)
    try:
        await client.get_workflow_handle(target.workflow_id).cancel()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise TemporalUnavailableError(f"Temporal cannot cancel {target.workflow_id}: {error.message}") from error
    return answer


async def reset_stage(
    database: Database, client: Client, what: str, stage: str, request_id: str, by: str, reason: str
) -> SteeringAnswer:
    """Try a rollout's stage again now: one that waits for its next try begins it, one that runs is begun anew.

    The request is recorded first, like all others, so that a stage that was begun anew always has its
    audit row. Raises ConfigError if no such stage of the rollout is pending.
    """
    target = await database.run(steering_targets.find_target, what)
    pending = await _pending_stages(client, target)
    if stage not in pending:
        if not pending:
            raise ConfigError(f"{target.workflow_id} has no stage that is pending: it has ended, or is between two")
        names = ", ".join(sorted(pending))
        raise ConfigError(f"{target.workflow_id} has no stage {stage!r} that is pending; there is {names}")
    async with database.begin() as connection:
        request = Request(target.run_id, request_id, by, reason)
        next_step = await plans.newest_planned_step(connection, target.run_id) + 1
        names = f"{target.workflow_id} {stage}"
        await steering.record(connection, request, SteeringAction.RETRY, names, "pending", "retried", next_step)
    execution = WorkflowExecution(workflow_id=target.workflow_id)
    wanted = ResetActivityRequest(
        namespace=client.namespace, execution=execution, identity=client.identity, id=pending[stage]
    )
    try:
        await client.workflow_service.reset_activity(wanted)
    except RPCError as error:
        raise TemporalUnavailableError(f"Temporal cannot reset {stage}: {error.message}") from error
    return SteeringAnswer(f"{target.workflow_id}: {stage} is tried again now")


async def _pending_stages(client: Client, target: Target) -> dict[str, str]:
    """Return stage → the id of its activity, for the activities of the rollout that have not ended."""
    try:
        described = await describe_workflow(client, target.workflow_id)
    except RPCError as error:
        raise TemporalUnavailableError(f"Temporal cannot describe {target.workflow_id}: {error.message}") from error
    if described is None:
        return {}
    return {one.activity_type.name: one.activity_id for one in described.pending_activities}


async def run_of(database: Database, what: str) -> str:
    """Return the run of a group or a rollout. Raises ConfigError if there is none."""
    return (await database.run(steering_targets.find_target, what)).run_id
