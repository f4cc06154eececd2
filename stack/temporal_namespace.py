"""Prepare the namespace that this installation works in, and make sure that no other installation works in it.

Two installations with the same queue names on one namespace would take each other's work, and a sweep in another
namespace than that of the workflows would take every rollout for orphaned. So each side knows the other: the row
`installation` holds the namespace's id, and the sweep's schedule holds the installation's id.

| row knows         | schedule knows       | `ratchet up`                                                              |
|-------------------|----------------------|---------------------------------------------------------------------------|
| nothing           | nothing              | writes both                                                               |
| this namespace    | this installation    | goes on                                                                   |
| another namespace | anything             | on a server of our own, whose data was lost: writes both; else refuses    |
| anything          | another installation | refuses, except on a server of our own if the store is a copy of its      |

`ratchet up --moved` and `--copied` answer what is refused, because only a person knows if the other one is gone. A
database that is not ours and finds itself beside a new server of our own may be a copy, and takes a new id.

Workers wait until the row names their namespace. On a server of our own `up` also registers what is missing; on
another server it changes nothing but the schedule, and names what an administrator has to do.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import structlog
from google.protobuf.duration_pb2 import Duration
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
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
from temporalio.service import RPCError, RPCStatusCode

from ratchet.errors import MachineError
from ratchet.payload_codec import PayloadKeyError, codec_of
from ratchet.sweep_payloads import SweepInput
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import SEARCH_ATTRIBUTES
from store import installations
from store.database import Database

_LOG = structlog.get_logger()
SWEEP_SCHEDULE = "sweep"
_SWEEP_TIMEOUT = timedelta(hours=1)
"""A sweep that no worker can go on with keeps the next one back for so long."""
_OWNER = "ratchet_installation"
"""Key of the memo of the sweep's workflow, which holds the installation's id."""
_REFUSED_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0


async def prepare_namespace(
    client: Client, database: Database, settings: TemporalSettings, is_own: bool, moved: bool | None = None
) -> None:
    """Claim the namespace for this installation, and see to search attributes and the sweep's schedule. Repeatable.

    `is_own`: the server is a part of this stack, so that retention and search attributes are set here. `moved`: a
    person says that the store was moved and its original is gone (True), or that it is a copy (False). Raises
    MachineError if another installation works in the namespace, if this one works in another, or if something is
    missing that only an administrator may add.
    """
    found, owner = await _namespace_id(client), await _schedule_owner(client, settings.own(SWEEP_SCHEDULE))
    async with database.begin() as connection:
        row = await installations.installation(connection)
        is_elsewhere = row.namespace_id not in (None, found)
        if moved:
            await installations.become_original(connection, row, None if owner in row.own_ids else owner)
        elif not row.copied_from and (moved is False or (is_own and is_elsewhere and not row.is_embedded)):
            await installations.become_copy(connection, row, row.place)
        if moved is False:
            await installations.set_installation_namespace(connection, None)
        row = await installations.installation(connection)
    if row.copy_warning and moved is None:
        _LOG.warning(row.copy_warning)
    await require_own_namespace(client, database, settings, is_own)
    if is_own:
        kept = NamespaceConfig(workflow_execution_retention_ttl=Duration(seconds=settings.retention_days * 86400))
        await client.workflow_service.update_namespace(UpdateNamespaceRequest(namespace=client.namespace, config=kept))
        await _add_search_attributes(client)
    else:
        await _require_search_attributes(client)
    await _schedule_sweep(client, settings, row.uuid)
    async with database.begin() as connection:
        await installations.set_installation_namespace(connection, found)
        if moved is False:
            await installations.forget_original(connection)


async def require_own_namespace(client: Client, database: Database, settings: TemporalSettings, is_own: bool) -> None:
    """Raise MachineError, with the remedy, if database and namespace belong to different installations."""
    found = await _namespace_id(client)
    row = await database.run(installations.stored_installation)
    known = row and row.namespace_id
    if known is not None and known != found and not is_own:
        raise MachineError(
            f"the workflows of this database are in another namespace (id {known}) than {client.namespace} (id "
            f"{found}): set TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE to that one; if it is gone for good, `ratchet up "
            "--moved` starts the open runs here; if this database is a copy and the original works on there, `ratchet "
            "up --copied` makes it another installation"
        )
    name = settings.own(SWEEP_SCHEDULE)
    owner = await _schedule_owner(client, name)
    ours = (*row.own_ids, *(row.copied_from if is_own else ())) if row else ()
    if owner is not None and owner not in ours:
        raise MachineError(
            f"another installation ({owner}) works in namespace {client.namespace} under the same names: set "
            "RATCHET_INSTALLATION to a name of your own. If the other one is gone for good, or is this one, whose "
            "database was moved, restored or upgraded, or whose row was deleted, run `ratchet up --moved`"
        )


async def wait_for_namespace(client: Client, database: Database) -> None:
    """Wait without a limit until `prepare_namespace` has been called for this database and the client's namespace."""
    found = await _namespace_id(client)
    said = -_SAY_SECONDS
    while True:
        row = await database.run(installations.stored_installation)
        known = row and row.namespace_id
        if known == found:
            return
        if time.monotonic() - said >= _SAY_SECONDS:
            reason = f"the database belongs to namespace {known}, this is {client.namespace} ({found})"
            _LOG.warning("waiting for `ratchet up` to prepare the namespace", reason=reason if known else "it is new")
            said = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)


async def require_payload_keys(client: Client, settings: TemporalSettings) -> None:
    """Raise PayloadKeyError, with the remedy, if the last `up`'s payloads, or the last refused, cannot be decrypted."""
    await codec_of(client.data_converter).retry_refused()
    await _schedule_owner(client, settings.own(SWEEP_SCHEDULE))


async def wait_for_payload_keys(client: Client, settings: TemporalSettings, stopping: asyncio.Event) -> None:
    """Wait until `require_payload_keys` passes, or until `stopping` is set: work that cannot be read is not taken.

    A single payload is waited for a minute only. Its key may be lost for ever, which must not stop all other workflows.
    """
    began, said = time.monotonic(), -_SAY_SECONDS
    while not stopping.is_set():
        if time.monotonic() - began > _REFUSED_SECONDS:
            codec_of(client.data_converter).forget_refused()
        try:
            return await require_payload_keys(client, settings)
        except (PayloadKeyError, RPCError) as error:
            if time.monotonic() - said >= _SAY_SECONDS:
                _LOG.warning("waiting for the keys of Temporal's payloads", reason=str(error))
                said = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LOOK_SECONDS)


async def _namespace_id(client: Client) -> str:
    reply = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    return reply.namespace_info.id


async def _add_search_attributes(client: Client) -> None:
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    missing = {
        name: IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{kind.upper()}")
        for name, kind in SEARCH_ATTRIBUTES.items()
        if name not in listed.custom_attributes
    }
    if missing:
        request = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        try:
            await client.operator_service.add_search_attributes(request)
        except RPCError as error:
            if error.status is not RPCStatusCode.ALREADY_EXISTS:
                raise
    while not await _can_be_asked_for(client, *SEARCH_ATTRIBUTES):
        await asyncio.sleep(0.2)


async def _can_be_asked_for(client: Client, *names: str) -> bool:
    """Return whether workflows can be started with these attributes: some seconds after they are listed."""
    try:
        await client.count_workflows(" AND ".join(["WorkflowId = 'none'", *(f"{name} IS NULL" for name in names)]))
    except RPCError as error:
        if error.status is not RPCStatusCode.INVALID_ARGUMENT:
            raise
        return False
    return True


async def _require_search_attributes(client: Client) -> None:
    """An unknown search attribute would fail a workflow task again and again.

    They are asked for and not listed, because the operator service is not for users of Temporal Cloud.
    """
    missing = {name: kind for name, kind in SEARCH_ATTRIBUTES.items() if not await _can_be_asked_for(client, name)}
    if missing:
        wanted = " ".join(f"--name {name} --type {kind}" for name, kind in missing.items())
        in_cloud = " ".join(f"--search-attribute {name}={kind}" for name, kind in missing.items())
        name = client.namespace
        raise MachineError(
            f"namespace {name} lacks search attributes; ask its administrator to run `temporal operator "
            f"search-attribute create --namespace {name} {wanted}`, or in Temporal Cloud `tcld namespace "
            f"search-attributes add --namespace {name} {in_cloud}`"
        )


async def _schedule_sweep(client: Client, settings: TemporalSettings, installation: UUID) -> None:
    name = settings.own(SWEEP_SCHEDULE)
    memo = {_OWNER: str(installation)}
    action = ScheduleActionStartWorkflow("Sweep", SweepInput(), id=name, task_queue=settings.own("control"), memo=memo)
    action.execution_timeout = _SWEEP_TIMEOUT
    schedule = Schedule(
        action=action,
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=timedelta(seconds=settings.sweep.interval))]),
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=settings.sweep.catchup_window)
        ),
    )
    try:
        await client.create_schedule(name, schedule)
        return
    except ScheduleAlreadyRunningError:
        handle = client.get_schedule_handle(name)
    signed = _signature((await handle.describe()).schedule)
    is_ours = await _schedule_owner(client, name) == str(installation)
    # Signed with the newest key, so that every worker that lacks it waits.
    is_signed = signed is not None and is_ours and codec_of(client.data_converter).has_newest_key(signed)
    await handle.update(lambda known: _with_numbers_of(known, schedule, not is_signed))


async def _schedule_owner(client: Client, name: str) -> str | None:
    """Return the installation that made the sweep's schedule, None if none is known. Raises PayloadKeyError."""
    try:
        described = await client.get_schedule_handle(name).describe()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return None
    payload = _signature(described.schedule)
    return None if payload is None else str((await client.data_converter.decode([payload], [str]))[0])


def _signature(schedule: Schedule) -> Payload | None:
    action = schedule.action
    payload: Payload | None = None
    if isinstance(action, ScheduleActionStartWorkflow):
        payload = (action.memo or {}).get(_OWNER)
    return payload


def _with_numbers_of(known: ScheduleUpdateInput, wanted: Schedule, sign: bool) -> ScheduleUpdate | None:
    """Take action, interval and catch-up window from `wanted`, also to `sign` it; keep the rest, such as a pause."""
    found = known.description.schedule
    if _timing(found) == _timing(wanted) and not sign:
        return None
    return ScheduleUpdate(replace(found, action=wanted.action, spec=wanted.spec, policy=wanted.policy))


def _timing(schedule: Schedule) -> tuple[object, ...]:
    limit = getattr(schedule.action, "execution_timeout", None)
    return [interval.every for interval in schedule.spec.intervals], schedule.policy.catchup_window, limit
