"""Connect to Temporal, start the workflow of a run, and read why a workflow failed."""

import asyncio
from collections.abc import Collection
from datetime import timedelta

from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError, RPCStatusCode

from ratchet.errors import MachineError, TemporalUnavailableError
from ratchet.payloads import TrainRunInput
from ratchet.temporal_settings import TemporalSettings

GRACEFUL_SHUTDOWN = timedelta(seconds=5)
_CONCURRENT_CALLS = 16


async def connect_temporal(settings: TemporalSettings, wait_seconds: float = 10) -> Client:
    """Connect, retrying for `wait_seconds`; TEMPORAL_* variables override temporal.yaml. Raises MachineError."""
    arguments = dict(ClientConfig.load_client_connect_config())
    arguments.setdefault("target_host", settings.address)
    arguments.setdefault("namespace", settings.namespace)
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            client = await Client.connect(data_converter=pydantic_data_converter, **arguments)  # type: ignore[arg-type]
            # fails until the server knows the namespace
            request = ListSearchAttributesRequest(namespace=client.namespace)
            await client.operator_service.list_search_attributes(request)
            return client
        except (RuntimeError, RPCError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise MachineError(
                    f"Temporal at {arguments['target_host']} does not answer ({str(error)[:120]}); "
                    "start it with `ratchet up`, or set TEMPORAL_ADDRESS"
                ) from error
        await asyncio.sleep(0.5)


async def describe_workflow(client: Client, workflow_id: str) -> WorkflowExecutionDescription | None:
    """Describe the newest execution of a workflow; None if there is none. Raises RPCError."""
    try:
        return await client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


async def workflow_statuses(client: Client, workflow_ids: Collection[str]) -> dict[str, WorkflowExecutionStatus | None]:
    """Return the status of the newest execution of each workflow, None if there is none.

    Asked by describing each, because Temporal's visibility lags. Raises TemporalUnavailableError.
    """
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def status(workflow_id: str) -> WorkflowExecutionStatus | None:
        async with limit:
            try:
                described = await describe_workflow(client, workflow_id)
            except RPCError as error:
                raise TemporalUnavailableError(f"Temporal cannot describe {workflow_id}: {error.message}") from error
        return described.status if described is not None else None

    ordered = sorted(workflow_ids)
    return dict(zip(ordered, await asyncio.gather(*(status(workflow_id) for workflow_id in ordered)), strict=True))


def root_cause(error: BaseException) -> str:
    """Return the message of the innermost cause of a workflow's failure."""
    inner = error
    while (below := getattr(inner, "cause", None)) is not None:
        inner = below
    return str(getattr(inner, "message", None) or inner)


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
