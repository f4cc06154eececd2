"""Connect to Temporal and register the namespace's retention, search attributes and sweep schedule.

Workers check the search attributes before they poll, because an unknown one fails a workflow task again and again.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError, RPCStatusCode

from ratchet.errors import MachineError
from ratchet.payloads import SweepInput, TrainRunInput
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import SEARCH_ATTRIBUTES

GRACEFUL_SHUTDOWN = timedelta(seconds=5)
SWEEP_SCHEDULE = "sweep"


async def connect_temporal(settings: TemporalSettings, wait_seconds: float = 10) -> Client:
    """Connect, retrying for `wait_seconds`; TEMPORAL_* variables override temporal.yaml. Raises MachineError."""
    arguments = dict(ClientConfig.load_client_connect_config())
    arguments.setdefault("target_host", settings.address)
    arguments.setdefault("namespace", settings.namespace)
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            return await Client.connect(data_converter=pydantic_data_converter, **arguments)  # type: ignore[arg-type]
        except (RuntimeError, RPCError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise MachineError(
                    f"Temporal at {arguments['target_host']} does not answer ({str(error)[:120]}); "
                    "start it with `ratchet up`, or set TEMPORAL_ADDRESS"
                ) from error
        await asyncio.sleep(0.5)


def root_cause(error: BaseException) -> str:
    """Return the message of the innermost cause of a workflow's failure."""
    inner = error
    while (below := getattr(inner, "cause", None)) is not None:
        inner = below
    return str(getattr(inner, "message", None) or inner)


async def start_train_run(client: Client, run_id: str) -> None:
    """Start the workflow of an existing run, or wake it if it runs."""
    await client.start_workflow(
        "TrainRun",
        TrainRunInput(run_id=run_id),
        id=f"run/{run_id}",
        task_queue="control",
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        start_signal="wake",
    )


async def register_namespace(client: Client, settings: TemporalSettings) -> None:
    """Set retention, search attributes and the sweep's schedule; safe to repeat."""
    retention = Duration(seconds=settings.retention_days * 86400)
    config = NamespaceConfig(workflow_execution_retention_ttl=retention)
    await client.workflow_service.update_namespace(UpdateNamespaceRequest(namespace=client.namespace, config=config))
    known = await _search_attributes(client)
    missing = {
        name: IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{kind.upper()}")
        for name, kind in SEARCH_ATTRIBUTES.items()
        if name not in known
    }
    if missing:
        request = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        try:
            await client.operator_service.add_search_attributes(request)
        except RPCError as error:
            if error.status is not RPCStatusCode.ALREADY_EXISTS:
                raise
    while set(SEARCH_ATTRIBUTES) - await _search_attributes(client):
        await asyncio.sleep(0.2)
    await _schedule_sweep(client, settings)


async def _search_attributes(client: Client) -> set[str]:
    reply = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return set(reply.custom_attributes)


async def require_search_attributes(client: Client, wait_seconds: float = 60) -> None:
    """Wait for the search attributes. Raises MachineError naming the missing ones after `wait_seconds`."""
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while missing := set(SEARCH_ATTRIBUTES) - await _search_attributes(client):
        if asyncio.get_running_loop().time() > deadline:
            names = ", ".join(f"{name} ({SEARCH_ATTRIBUTES[name]})" for name in sorted(missing))
            raise MachineError(
                f"namespace {client.namespace} lacks the search attributes {names}; `ratchet up` registers them"
            )
        await asyncio.sleep(0.5)


async def _schedule_sweep(client: Client, settings: TemporalSettings) -> None:
    schedule = Schedule(
        action=ScheduleActionStartWorkflow("Sweep", SweepInput(), id="sweep", task_queue="control"),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=timedelta(seconds=settings.sweep.interval))]),
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=settings.sweep.catchup_window)
        ),
    )
    try:
        await client.create_schedule(SWEEP_SCHEDULE, schedule)
    except ScheduleAlreadyRunningError:
        await client.get_schedule_handle(SWEEP_SCHEDULE).update(lambda known: _with_numbers_of(known, schedule))


def _with_numbers_of(known: ScheduleUpdateInput, wanted: Schedule) -> ScheduleUpdate | None:
    """Take interval and catch-up window from `wanted`; keep everything else, such as whether a user has paused it."""
    found = known.description.schedule
    if _timing(found) == _timing(wanted):
        return None
    return ScheduleUpdate(replace(found, spec=wanted.spec, policy=wanted.policy))


def _timing(schedule: Schedule) -> tuple[list[timedelta], timedelta | None]:
    return [interval.every for interval in schedule.spec.intervals], schedule.policy.catchup_window
