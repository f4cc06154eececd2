"""Start a workflow on a running stack and wait for its result, for requests that consist of one workflow."""

from typing import TypeVar

from pydantic import BaseModel
from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from ratchet.errors import ConfigError
from ratchet.temporal_client import root_cause
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.progress import ReportProgress
from stack.startup import connect_running

_T = TypeVar("_T", bound=BaseModel)


async def run_workflow(
    stack: Stack, name: str, argument: BaseModel, workflow_id: str, result_type: type[_T], say: ReportProgress
) -> _T:
    """Return the workflow's result; one with this id that runs already is waited for.

    Raises ConfigError with the root cause of a failure, MachineError if Temporal does not answer.
    """
    settings = load_temporal_settings()
    client = await connect_running(stack, settings)
    workflow_id = settings.own(workflow_id)
    say(f"workflow {workflow_id}")
    try:
        result: _T = await client.execute_workflow(
            name,
            argument,
            id=workflow_id,
            task_queue=settings.own("control"),
            result_type=result_type,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
    except WorkflowFailureError as error:
        raise ConfigError(f"{name} failed: {root_cause(error)}") from None
    return result
