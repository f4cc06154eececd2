"""Start a workflow on a running stack and wait for its result, for requests that consist of one workflow."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowQueryFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from ratchet.errors import ConfigError
from ratchet.payload_codec import PayloadKeyError
from ratchet.progress import ReportProgress
from ratchet.status_payloads import RolloutStatus
from ratchet.temporal_client import PendingActivity, one_line, pending_activities, root_cause, starting
from ratchet.temporal_settings import load_temporal_settings
from reads.failures import kind_of_error
from stack.parts import Stack
from stack.run_status import retried_activities
from stack.startup import connect_stack, require_up

_T = TypeVar("_T", bound=BaseModel)
_R = TypeVar("_R")
_LOOK_SECONDS = 3.0
_SAY_AGAIN_SECONDS = 600.0
_MAX_KINDS = 20
"""Kinds of failures that are said of one workflow; `ratchet status` and Temporal's UI show more."""
_METADATA_QUERY = "__temporal_workflow_metadata"
"""Every workflow answers it; the Temporal UI reads the current details by it."""


async def run_workflow(
    stack: Stack, name: str, argument: BaseModel, workflow_id: str, result_type: type[_T], say: ReportProgress
) -> _T:
    """Return the workflow's result; one with this id that runs already is waited for. Say meanwhile what it does, and
    which of its activities fail.

    Raises ConfigError with the root cause of a failure, MachineError if Temporal does not answer before the start, or
    if the stack is stopped meanwhile.
    """
    settings = load_temporal_settings()
    client = await connect_stack(stack, settings)
    workflow_id = settings.own(workflow_id)
    say(f"workflow {workflow_id}")
    with starting(workflow_id):
        handle = await client.start_workflow(
            name,
            argument,
            id=workflow_id,
            task_queue=settings.own("control"),
            result_type=result_type,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
    try:
        return await _follow_through_outages(stack, client, handle, name, say)
    except WorkflowFailureError as error:
        if isinstance(error.cause, ApplicationError) and error.cause.details:  # a rollout without a verdict
            return result_type.model_validate(error.cause.details[0])
        raise ConfigError(f"{name} failed: {root_cause(error)}") from None


async def _follow_through_outages(
    stack: Stack, client: Client, handle: WorkflowHandle[Any, _T], name: str, say: ReportProgress
) -> _T:
    """Follow the workflow; while Temporal does not answer, wait for it. Raises as `run_workflow` does."""
    is_away = False

    def note_answer() -> None:
        nonlocal is_away
        is_away = False

    while True:
        try:
            return await follow_workflow(client, handle, name, say, note_answer)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise ConfigError(
                    f"Temporal has no workflow {handle.id} any more; its state was lost or its retention is over. "
                    "Repeat the command"
                ) from None
            await require_up(stack, f"{handle.id} goes on")
            if not is_away:
                say(f"Temporal does not answer ({one_line(error)}); {handle.id} is waited for")
            is_away = True
        await asyncio.sleep(_LOOK_SECONDS)


async def follow_workflow(
    client: Client,
    handle: WorkflowHandle[Any, _R],
    name: str,
    say: ReportProgress,
    note_answer: Callable[[], None] = lambda: None,
) -> _R:
    """Wait for the result of a workflow of type `name`; say what it does and what fails whenever that has changed.

    `note_answer` is called whenever Temporal has answered a look.

    Raises WorkflowFailureError, and RPCError if Temporal does not answer.
    """
    result = asyncio.create_task(handle.result())
    failures = SaidFailures()
    said = ""
    try:
        while not (await asyncio.wait({result}, timeout=_LOOK_SECONDS))[0]:
            # Looks only: Temporal or a worker may be away, and another key may have encrypted what they say.
            with contextlib.suppress(RPCError, PayloadKeyError):
                pending = await pending_activities(client, handle.id)
                note_answer()
                for line in failures.new_ones(pending or [], time.monotonic()):
                    say(line)
            with contextlib.suppress(RPCError, WorkflowQueryFailedError):
                does = await (_stage(handle) if name == "Rollout" else _details(handle))
                if does and does != said:
                    say(does)
                    said = does
        return result.result()
    finally:
        result.cancel()
        await asyncio.gather(result, return_exceptions=True)  # else a failure that comes now is printed as unretrieved


class SaidFailures:
    """Filter that reports each kind of activity failure of a workflow once, and again if it still lasts later.

    Errors that differ only in numbers and ids, such as that of a box, are one kind. A workflow of many activities could
    otherwise fill a screen with one cause.
    """

    def __init__(self) -> None:
        self._said_at: dict[tuple[str, str], float] = {}

    def new_ones(self, pending: Sequence[PendingActivity], now: float) -> list[str]:
        """Return a sentence for each failure that is new. `now`: seconds of a monotonic clock."""
        lines = []
        for one in retried_activities(pending):
            kind = (one.activity, kind_of_error(one.error))
            before = self._said_at.get(kind)
            if before is None and len(self._said_at) >= _MAX_KINDS:
                continue
            if before is None or now - before >= _SAY_AGAIN_SECONDS:
                self._said_at[kind] = now
                lines.append(one.sentence())
        return lines


async def _stage(handle: WorkflowHandle[Any, _R]) -> str:
    status = await handle.query("state", result_type=RolloutStatus)
    again = f", attempt {status.attempt}" if status.attempt > 1 else ""
    return f"stage {status.stage.replace('_', ' ')}{again}"


async def _details(handle: WorkflowHandle[Any, _R]) -> str:
    """Return the first line of the details that the Temporal UI shows."""
    metadata = await handle.query(_METADATA_QUERY, result_type=WorkflowMetadata)
    return str(metadata.current_details).partition("\n")[0]
