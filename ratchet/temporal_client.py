"""Connect to Temporal, start the workflow of a run, and read why a workflow failed."""

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.api.enums.v1 import WorkflowExecutionStatus as Status
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    DescribeWorkflowExecutionResponse,
    ListWorkflowExecutionsRequest,
    ResetWorkflowExecutionRequest,
)
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfig
from temporalio.runtime import Runtime
from temporalio.service import KeepAliveConfig, RPCError, RPCStatusCode

from ratchet.errors import ConfigError, MachineError, SandboxFullError, TemporalUnavailableError
from ratchet.patience import ANSWER_SECONDS, Patience
from ratchet.payload_codec import payload_converter
from ratchet.payloads import TrainRunInput
from ratchet.secrets import without_secrets
from ratchet.temporal_settings import TemporalSettings

GRACEFUL_SHUTDOWN = timedelta(seconds=5)
_CONCURRENT_CALLS = 16
_MAX_CHARACTERS = 300
_FAILING_TRIES = 4
"""Tries of a workflow task; a worker that ends costs one or two."""
_FAILING_TASK = "no worker can go on with {0} (`ratchet admin logs worker`); the sweep begins it anew, up to {1} times"
_FAILING = (
    "ExecutionStatus = 'Running' AND TaskQueue = '{}' AND TemporalReportedProblems = 'category=WorkflowTaskFailed'"
)
_HAS_BEEN_RESET = WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_RESET_WORKFLOW
_TASK_COMPLETED = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
_OF_HISTORY = ("[TMPRL1100]", "Fatal error in workflow machines")
"""The SDK's words about a history that it cannot replay. After other failures, bugs, a mended worker goes on."""
_MOST_RESETS = 3
"""Resets of one execution. A restore needs one; a workflow that contradicts itself each time is a bug in its code."""
_WAITING_CALLS = ("get_workflow_execution_history", "query_workflow")
"""Calls that the server answers when a workflow has gone on, or a worker has answered."""
_READING_CALLS = ("count_", "describe_", "get_", "list_")
"""Beginnings of the names of calls that change nothing, so that they may be made again."""


async def connect_temporal(
    settings: TemporalSettings, wait_seconds: float = 10, runtime: Runtime | None = None
) -> Client:
    """Connect, retrying for `wait_seconds`, and for ANSWER_SECONDS while a server takes connections and has not
    answered; TEMPORAL_* variables override temporal.yaml. Raises MachineError.

    Every call of the client is given ANSWER_SECONDS, so that none ends because the server is slow.
    The client encrypts payloads if RATCHET_PAYLOAD_KEY_FILE is set (`ratchet.payload_codec`).
    `runtime`: of the SDK, None for the one that all clients of the process share.
    """
    arguments = dict(ClientConfig.load_client_connect_config())
    arguments.setdefault("target_host", settings.address)
    arguments.setdefault("namespace", settings.namespace)
    # At the SDK's 15 s a connection whose pings are late would be closed.
    arguments.setdefault("keep_alive_config", KeepAliveConfig(timeout_millis=round(1000 * ANSWER_SECONDS)))
    converter, patience = payload_converter(), Patience(f"Temporal at {arguments['target_host']}")
    began = asyncio.get_running_loop().time()
    while True:
        try:
            with patience.waiting():
                client = await _connect(converter, runtime, arguments)
            _wait_for_answers(client, patience)
            # Fails until the server knows the namespace. The operator service is not for users of Temporal Cloud.
            request = ListWorkflowExecutionsRequest(namespace=client.namespace, page_size=1)
            await client.workflow_service.list_workflow_executions(request)
            return client
        except (RuntimeError, RPCError) as error:
            is_late = "Timeout expired" in str(error)
            limit = max(wait_seconds, ANSWER_SECONDS) if is_late else wait_seconds
            if asyncio.get_running_loop().time() - began > limit:
                refused = "Connection refused" in str(error)  # deep in the SDK's words
                raise MachineError(
                    f"Temporal at {arguments['target_host']} does not answer "
                    f"({'connection refused' if refused else str(error)[:240]}); "
                    "start it with `ratchet up`, or set TEMPORAL_ADDRESS"
                ) from error
        await asyncio.sleep(0.5)


async def _connect(converter: DataConverter, runtime: Runtime | None, arguments: dict[str, Any]) -> Client:
    """Raises MachineError for an address that is none and for settings that do not fit; else as the SDK does."""
    try:
        return await Client.connect(data_converter=converter, runtime=runtime, **arguments)
    except ValueError as error:
        if str(error).startswith("invalid target URL"):
            raise MachineError(
                f"TEMPORAL_ADDRESS: {arguments['target_host']!r} is no address ({error}); expected HOST:PORT"
            ) from None
        raise MachineError(f"Temporal's client refuses the TEMPORAL_* variables or its config: {error}") from error


def _wait_for_answers(client: Client, patience: Patience) -> None:
    """Give every call ANSWER_SECONDS in place of the SDK's 30 s, for which it has no setting.

    A busy server ends some calls by shorter deadlines of its own; those that only read are then made again.
    """
    service = client.service_client
    call = service._rpc_call

    async def patient_call(rpc: str, *arguments: Any, timeout: timedelta | None, **options: Any) -> Any:
        timeout = timeout or timedelta(seconds=ANSWER_SECONDS)
        ends_at = asyncio.get_running_loop().time() + timeout.total_seconds()
        with contextlib.nullcontext() if rpc in _WAITING_CALLS else patience.waiting():
            while True:
                try:
                    return await call(rpc, *arguments, timeout=timeout, **options)
                except RPCError as error:
                    is_cut = error.status is RPCStatusCode.DEADLINE_EXCEEDED and rpc.startswith(_READING_CALLS)
                    if not is_cut or asyncio.get_running_loop().time() >= ends_at:
                        raise
                await asyncio.sleep(0.5)

    service._rpc_call = patient_call  # type: ignore[method-assign]


class WorkflowState(IntEnum):
    """The state of a workflow's newest execution, with Temporal's numbers.

    `PAUSED` (by a person, in the UI) and every number that this version does not know count as open, so that the sweep
    does not end what belongs to such a workflow.
    """

    OTHER = 0
    RUNNING = Status.WORKFLOW_EXECUTION_STATUS_RUNNING
    COMPLETED = Status.WORKFLOW_EXECUTION_STATUS_COMPLETED
    FAILED = Status.WORKFLOW_EXECUTION_STATUS_FAILED
    CANCELED = Status.WORKFLOW_EXECUTION_STATUS_CANCELED
    TERMINATED = Status.WORKFLOW_EXECUTION_STATUS_TERMINATED
    CONTINUED_AS_NEW = Status.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW
    TIMED_OUT = Status.WORKFLOW_EXECUTION_STATUS_TIMED_OUT
    PAUSED = Status.WORKFLOW_EXECUTION_STATUS_PAUSED

    @property
    def is_open(self) -> bool:
        return self in (WorkflowState.RUNNING, WorkflowState.PAUSED, WorkflowState.OTHER)

    @classmethod
    def _missing_(cls, value: object) -> "WorkflowState":
        return cls.OTHER


async def describe_workflow(client: Client, workflow_id: str) -> DescribeWorkflowExecutionResponse | None:
    """Describe the newest execution, or None; the SDK's raises ValueError for a paused one. Raises RPCError."""
    request = DescribeWorkflowExecutionRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
    )
    try:
        return await client.workflow_service.describe_workflow_execution(request, retry=True)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


@dataclass(slots=True, frozen=True)
class PendingActivity:
    """An activity that has not ended. `heartbeat`: what its newest heartbeat says, such as the command that runs.

    `error`: what the try before this one failed with. Both are empty without words. `is_waiting`: for room.
    """

    name: str
    attempt: int
    heartbeat: str
    error: str
    is_waiting: bool = False


async def pending_activities(client: Client, workflow_id: str) -> list[PendingActivity] | None:
    """Return the activities of an open workflow that have not ended, and its own task if workers fail it; None if it
    is not open.

    Raises RPCError, and PayloadKeyError if what they say cannot be decrypted.
    """
    described = await describe_workflow(client, workflow_id)
    if described is None or not WorkflowState(described.workflow_execution_info.status).is_open:
        return None
    found = [await _pending_activity(client, info) for info in described.pending_activities]
    if (attempt := described.pending_workflow_task.attempt) >= _FAILING_TRIES:
        found.append(PendingActivity("workflow task", attempt, "", _FAILING_TASK.format(workflow_id, _MOST_RESETS)))
    return found


async def _pending_activity(client: Client, info: PendingActivityInfo) -> PendingActivity:
    told = await client.data_converter.decode(list(info.heartbeat_details.payloads)[:1])
    heartbeat = without_secrets(told[0]) if told and isinstance(told[0], str) else ""
    error = ""
    if info.HasField("last_failure"):
        failure = await client.data_converter.decode_failure(info.last_failure)
        error = without_secrets(str(getattr(failure, "message", failure)))
    is_waiting = info.last_failure.application_failure_info.type == SandboxFullError.__name__
    return PendingActivity(info.activity_type.name, info.attempt, heartbeat, error, is_waiting)


async def workflow_states(client: Client, workflow_ids: Collection[str]) -> dict[str, WorkflowState | None]:
    """Return the state of the newest execution of each workflow, None if there is none.

    Asked by describing each, because Temporal's visibility lags. Raises TemporalUnavailableError.
    """
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def state(workflow_id: str) -> WorkflowState | None:
        async with limit:
            try:
                described = await describe_workflow(client, workflow_id)
            except RPCError as error:
                raise TemporalUnavailableError(f"Temporal cannot describe {workflow_id}: {error.message}") from error
        return WorkflowState(described.workflow_execution_info.status) if described is not None else None

    ordered = sorted(workflow_ids)
    return dict(zip(ordered, await asyncio.gather(*(state(workflow_id) for workflow_id in ordered)), strict=True))


async def reset_contradicted(client: Client, task_queue: str) -> list[str]:
    """Reset to their first task the open workflows whose histories workers could not replay, five times in a row, if
    they were reset fewer than _MOST_RESETS times; return their ids. A server before 1.30 does not know them. Raises
    RPCError."""
    found = []
    async for one in client.list_workflows(_FAILING.format(task_queue)):
        described = await describe_workflow(client, one.id)  # visibility lags
        if described is None or described.pending_workflow_task.attempt < _FAILING_TRIES:
            continue
        execution = described.workflow_execution_info.execution
        handle = client.get_workflow_handle(one.id, run_id=execution.run_id)
        events = [event async for event in handle.fetch_history_events()]
        words = [event.workflow_task_failed_event_attributes.failure.message for event in events]
        if not any(of_history in next(filter(None, reversed(words)), "") for of_history in _OF_HISTORY):
            continue
        resets = [event.workflow_task_failed_event_attributes.cause for event in events].count(_HAS_BEEN_RESET)
        first = next((event.event_id for event in events if event.event_type == _TASK_COMPLETED), None)
        if first is None or resets >= _MOST_RESETS:
            continue
        request = ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=execution,
            workflow_task_finish_event_id=first,
            reason="its history contradicts the workers",
            request_id=execution.run_id,
        )
        with contextlib.suppress(RPCError):  # one that is refused stands in the next sweep's list again
            await client.workflow_service.reset_workflow_execution(request, retry=True)
            found.append(one.id)
    return found


async def open_workflows(client: Client, workflow_ids: Collection[str]) -> set[str]:
    """Return those of the workflows whose newest execution has not ended. Raises TemporalUnavailableError."""
    states = await workflow_states(client, workflow_ids)
    return {name for name, state in states.items() if state is not None and state.is_open}


def root_cause(error: BaseException) -> str:
    """Return the message of the innermost cause of a workflow's failure."""
    inner = error
    while (below := getattr(inner, "cause", None)) is not None:
        inner = below
    return str(getattr(inner, "message", None) or inner)


def one_line(error: RPCError) -> str:
    """Return what Temporal, or the way to it, answers, short enough for a sentence."""
    return " ".join(error.message.split())[:_MAX_CHARACTERS] or error.status.name


def is_too_large(error: RPCError) -> bool:
    """Return whether gRPC refuses the request's size, for which it has the same status as for a limit of calls."""
    return error.status is RPCStatusCode.RESOURCE_EXHAUSTED and "message larger than max" in error.message


@contextlib.contextmanager
def starting(workflow_id: str) -> Iterator[None]:
    """Name the workflow that a command starts in the block if Temporal does not start it.

    Raises ConfigError if Temporal refuses what the request says, MachineError for anything that may go away.
    """
    try:
        yield
    except RPCError as error:
        words = f"Temporal has not started {workflow_id} ({one_line(error)})"
        if error.status is RPCStatusCode.INVALID_ARGUMENT or is_too_large(error):
            raise ConfigError(f"{words}; it refuses the request itself, which may be too large") from None
        raise MachineError(f"{words}; `ratchet status` says how it is; repeat the command") from None


async def start_train_run(client: Client, settings: TemporalSettings, run_id: str) -> None:
    """Start the workflow of an existing run, or wake it if it runs."""
    await client.start_workflow(
        "TrainRun",
        TrainRunInput(run_id=run_id),
        id=f"run/{run_id}",
        task_queue=settings.own("control"),
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        start_signal="wake",
    )
