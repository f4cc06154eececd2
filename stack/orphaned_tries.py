"""End the tries of activities whose worker process has ended, so that they begin again at once.

Temporal itself takes a try for lost only after minutes without a heartbeat, because a busy machine delays those of
living workers. A new worker knows more: each worker leaves a file in the state directory, by which it is known which of
them have ended. Temporal knows a worker by `PID@HOST`, which another machine or container may have, too.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Set
from functools import cache
from pathlib import Path

import structlog
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import AsyncActivityHandle, Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from ratchet.temporal_client import describe_workflow, one_line
from ratchet.temporal_settings import TemporalSettings

_LOG = structlog.get_logger()

_CONCURRENT_CALLS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def note_worker(home: Path) -> None:
    """Leave the file of this process; without one, on a full disk or without /proc, its tries are left to Temporal."""
    with contextlib.suppress(OSError):
        directory = home / "workers"
        directory.mkdir(exist_ok=True)
        (directory / str(os.getpid())).write_text(_process(os.getpid()))


def ended_workers(home: Path) -> dict[str, Path]:
    """Return identity → file of the workers that ran here and have ended. An identity that a living one has is none."""
    ended: dict[str, Path] = {}
    alive: set[str] = set()
    with contextlib.suppress(OSError):
        for file in (home / "workers").glob("[0-9]*"):
            pid, said = int(file.name), file.read_text()
            identity = f"{pid}@{socket.gethostname()}"
            if said == _process(pid):
                alive.add(identity)
            elif said.rpartition(" ")[0] == _place():
                ended[identity] = file
    return {identity: file for identity, file in ended.items() if identity not in alive}


def _process(pid: int) -> str:
    """Return what no other process has: the place, and the clock ticks of the boot at which this one began. They are
    field 22 of /proc/PID/stat, in which the name, field 2, may hold spaces; 0 if there is no process."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        ticks = "0"
    return f"{_place()} {ticks}"


@cache
def _place() -> str:
    """Return where this process's ids of processes mean something. Raises OSError without /proc."""
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()} {namespace}"


async def end_orphaned_tries(client: Client, settings: TemporalSettings, home: Path) -> None:
    """End the tries of ended workers in all open workflows of this installation, and forget these workers."""
    ended = ended_workers(home)
    if not ended:
        return
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def look(workflow_id: str) -> int:
        async with limit:
            try:
                return await _end_tries(client, workflow_id, ended.keys())
            except RPCError as error:
                _LOG.warning("workflow not looked at for lost tries", workflow_id=workflow_id, reason=one_line(error))
                return 0

    query = f'ExecutionStatus = "Running" AND TaskQueue = "{settings.own("control")}"'
    ids = {one.id async for one in client.list_workflows(query)}
    num_ended = sum(await asyncio.gather(*(look(workflow_id) for workflow_id in ids)))
    if num_ended:
        _LOG.info("tries of ended workers begin again", tries=num_ended)
    for file in ended.values():
        file.unlink(missing_ok=True)


async def _end_tries(client: Client, workflow_id: str, ended: Set[str]) -> int:
    """End a workflow's tries of ended workers and return their number. Another worker may do so at the same time, so
    it is looked at anew before each."""
    num_ended = 0
    while (found := await _orphaned_try(client, workflow_id, ended)) is not None:
        await found.fail(ApplicationError("the worker process has ended", type="WorkerEndedError"))
        num_ended += 1
    return num_ended


async def _orphaned_try(client: Client, workflow_id: str, ended: Set[str]) -> AsyncActivityHandle | None:
    described = await describe_workflow(client, workflow_id)
    for one in described.pending_activities if described is not None else ():
        is_running = one.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        if described is not None and is_running and one.last_worker_identity in ended:
            return client.get_async_activity_handle(
                workflow_id=workflow_id,
                run_id=described.workflow_execution_info.execution.run_id,
                activity_id=one.activity_id,
            )
    return None
