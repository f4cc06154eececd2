"""End the tries of activities whose worker process has ended, so that they begin again at once.

Temporal itself takes a try for lost only after minutes without a heartbeat, because a busy machine delays those of
living workers. A new worker knows more: which processes of its own machine have ended. What ran on other machines, or
in other containers, is left to the heartbeats.
"""

import asyncio
import os
import re
import socket
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
_IDENTITY = re.compile(r"(?P<pid>\d+)@(?P<place>.+)#(?P<started>\d+)")


class WorkerProcess(NamedTuple):
    """A worker process. `place`: host, its boot and the namespace of process ids; `started`: clock ticks of that boot,
    which no correction of the clock moves."""

    pid: int
    place: str
    started: int

    @classmethod
    def of(cls, pid: int) -> "WorkerProcess":
        """Describe a process of this machine. Raises OSError if there is none."""
        return cls(pid, _place(), _start_ticks(pid))

    @classmethod
    def read(cls, identity: str) -> "WorkerProcess | None":
        """Read the identity that a worker has given to Temporal; None if it was not made here."""
        found = _IDENTITY.fullmatch(identity)
        return cls(int(found["pid"]), found["place"], int(found["started"])) if found else None

    @property
    def identity(self) -> str:
        return f"{self.pid}@{self.place}#{self.started}"

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended: it was one of this machine, and is none now."""
        if self.place != _place():
            return False
        try:
            return _start_ticks(self.pid) != self.started
        except OSError:
            return True


@cache
def _place() -> str:
    """Return where this process's ids of processes mean something. Equal host names and namespaces are common, the id
    of a boot is not."""
    if not _BOOT_ID.exists():  # no Linux: nothing is known of processes
        return socket.gethostname()
    namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    return f"{socket.gethostname()}/{_BOOT_ID.read_text()[:8]}/{namespace}"


def _start_ticks(pid: int) -> int:
    """Return field 22 of /proc/PID/stat; the name in field 2 may hold spaces. Raises OSError without the process."""
    if not _BOOT_ID.exists():
        return 0
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


async def end_orphaned_tries(client: Client, settings: TemporalSettings) -> None:
    """End the tries of ended processes in all open workflows of this installation; what cannot be asked is left out."""
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def look(workflow_id: str) -> int:
        async with limit:
            try:
                return await _end_tries(client, workflow_id)
            except RPCError as error:
                _LOG.warning("workflow not looked at for lost tries", workflow_id=workflow_id, reason=one_line(error))
                return 0

    query = f'ExecutionStatus = "Running" AND TaskQueue = "{settings.own("control")}"'
    ids = {one.id async for one in client.list_workflows(query)}
    num_ended = sum(await asyncio.gather(*(look(workflow_id) for workflow_id in ids)))
    if num_ended:
        _LOG.info("tries of ended workers begin again", tries=num_ended)


async def _end_tries(client: Client, workflow_id: str) -> int:
    """End a workflow's tries of ended processes and return their number. Another worker may do so at the same time, so
    it is looked at anew before each."""
    num_ended = 0
    while (found := await _orphaned_try(client, workflow_id)) is not None:
        await found.fail(ApplicationError("the worker process has ended", type="WorkerEndedError"))
        num_ended += 1
    return num_ended


async def _orphaned_try(client: Client, workflow_id: str) -> AsyncActivityHandle | None:
    described = await describe_workflow(client, workflow_id)
    for one in described.pending_activities if described is not None else ():
        worker = WorkerProcess.read(one.last_worker_identity)
        is_running = one.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        if described is not None and is_running and worker is not None and worker.has_ended():
            return client.get_async_activity_handle(
                workflow_id=workflow_id,
                run_id=described.workflow_execution_info.execution.run_id,
                activity_id=one.activity_id,
            )
    return None
