"""Start a workflow on a running stack and wait for its result, for requests that consist of one workflow."""

import asyncio
import contextlib
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowFailureError, WorkflowHandle, WorkflowQueryFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from ratchet.errors import ConfigError
from ratchet.status_payloads import RolloutStatus
from ratchet.temporal_client import root_cause
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.progress import ReportProgress
from stack.startup import connect_running

_T = TypeVar("_T", bound=BaseModel)
_R = TypeVar("_R")
_LOOK_SECONDS = 3.0
_METADATA_QUERY = "__temporal_workflow_metadata"
"""Every workflow answers it; the Temporal UI reads the current details by it."""


async def run_workflow(
    stack: Stack, name: str, argument: BaseModel, workflow_id: str, result_type: type[_T], say: ReportProgress
) -> _T:
    """Return the workflow's result; one with this id that runs already is waited for. Say meanwhile what it does.

    Raises ConfigError with the root cause of a failure, MachineError if Temporal does not answer.
    """
    settings = load_temporal_settings()
    client = await connect_running(stack, settings)
    workflow_id = settings.own(workflow_id)
    say(f"workflow {workflow_id}")
    try:
        handle = await client.start_workflow(
            name,
            argument,
            id=workflow_id,
            task_queue=settings.own("control"),
            result_type=result_type,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        return await follow_workflow(handle, name, say)
    except WorkflowFailureError as error:
        raise ConfigError(f"{name} failed: {root_cause(error)}") from None


async def follow_workflow(handle: WorkflowHandle[Any, _R], name: str, say: ReportProgress) -> _R:
    """Wait for the result of a workflow of type `name`, and say what it does whenever that has changed.

    Raises WorkflowFailureError.
    """
    result = asyncio.create_task(handle.result())
    said = ""
    try:
        while not (await asyncio.wait({result}, timeout=_LOOK_SECONDS))[0]:
            with contextlib.suppress(RPCError, WorkflowQueryFailedError):  # looks only; a worker may be away
                does = await (_stage(handle) if name == "Rollout" else _details(handle))
                if does and does != said:
                    say(does)
                    said = does
        return result.result()
    finally:
        result.cancel()


async def _stage(handle: WorkflowHandle[Any, _R]) -> str:
    status = await handle.query("state", result_type=RolloutStatus)
    again = f", attempt {status.attempt}" if status.attempt > 1 else ""
    return f"stage {status.stage.replace('_', ' ')}{again}"


async def _details(handle: WorkflowHandle[Any, _R]) -> str:
    """Return the first line of the details that the Temporal UI shows."""
    metadata = await handle.query(_METADATA_QUERY, result_type=WorkflowMetadata)
    return str(metadata.current_details).partition("\n")[0]
