"""End the tries of activities whose worker process has ended, so that they begin again at once.

Temporal itself takes a try for lost only after minutes without a heartbeat, because a busy machine delays those of
living workers. A new worker knows more: which processes of its own machine have ended. What ran on other machines, or
in other containers, is left to the heartbeats.
"""

import asyncio
import os
import re
import socket
from typing import NamedTuple

import psutil
import structlog
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from ratchet.temporal_client import describe_workflow, one_line
from ratchet.temporal_settings import TemporalSettings

_LOG = structlog.get_logger()

_CONCURRENT_CALLS = 8
_CLOCK_SECONDS = 2.0
"""The start of a process is computed from the machine's clock, which may be corrected meanwhile."""
_IDENTITY = re.compile(r"(?P<pid>\d+)@(?P<place>.+)#(?P<started>\d+)")


class WorkerProcess(NamedTuple):
    """A worker process. `place`: host and namespace of process ids; `started`: seconds since the epoch."""

    pid: int
    place: str
    started: int

    @classmethod
    def of(cls, pid: int) -> "WorkerProcess":
        """Describe a process of this machine. Raises psutil.NoSuchProcess."""
        return cls(pid, f"{socket.gethostname()}/{_pid_namespace()}", int(psutil.Process(pid).create_time()))

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
        if self.place != f"{socket.gethostname()}/{_pid_namespace()}":
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > _CLOCK_SECONDS
        except psutil.NoSuchProcess:
            return True


def _pid_namespace() -> str:
    """Return the namespace in which this process's ids of processes mean something; empty without /proc."""
    try:
        return os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    except OSError:
        return ""


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
    described = await describe_workflow(client, workflow_id)
    if described is None:
        return 0
    num_ended = 0
    execution = described.workflow_execution_info.execution
    for one in described.pending_activities:
        worker = WorkerProcess.read(one.last_worker_identity)
        is_running = one.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        if is_running and worker is not None and worker.has_ended():
            handle = client.get_async_activity_handle(
                workflow_id=workflow_id, run_id=execution.run_id, activity_id=one.activity_id
            )
            await handle.fail(ApplicationError("the worker process has ended", type="WorkerEndedError"))
            num_ended += 1
    return num_ended
