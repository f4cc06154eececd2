"""One probe per part: it does what the part's users ask of it, and returns in a few words what it found.

| part | what its probe does |
|---|---|
| postgres | commits a message to the write-ahead log, which leaves no row; refuses a read-only server |
| temporal | describes the namespace, lists one workflow, asks matching for the pollers of a task queue |
| temporal-ui | loads the page and the settings that the page loads first |
| gateway | lists the boxes; once a minute it runs a command in a box of its own and ends it; a front only lists |
| ray | asks the node's agent, which asks the raylet and the head's control service |
| engine | finds that tokens were generated since the last probe, else generates one; rarely while no run is open |
| adapter | sends a call with an unknown token, which the adapter looks up in the store; reads its heartbeat |
| learner | reads, for each run that needs one, the learner's heartbeat, phase and step |
| worker | asks Temporal when this worker process polled each queue last |
| viewer | asks it to read from the store |

A probe raises any exception to say that the part does not answer. Nothing that a probe does is counted: no session, no
turn, no workflow and no row is left behind.
"""

import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import asyncpg
import httpx
import psutil
from sqlalchemy import select
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    DescribeTaskQueueRequest,
    GetSystemInfoRequest,
    ListWorkflowExecutionsRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from engine.client import EngineClient
from engine.generate_request import Sampling
from ratchet import temporal_client
from ratchet.errors import RatchetError, SandboxFullError
from ratchet.payload_codec import PayloadKeyError
from ratchet.temporal_settings import QUEUES, TemporalSettings
from ratchet.types import EngineState
from sandboxes.e2b import E2BProvider
from stack import temporal_namespace
from stack.engine_parts import engine_addresses
from stack.part_health import HealthLimits, HealthState, PartHealth
from stack.parts import VIEWER, Stack
from stack.placement import part_kind, set_of_part
from store import engines, learners, lock_waits, open_runs
from store.columns import seconds_since
from store.database import Database, libpq_url
from store.schema import InstallationTable
from training.ray_demand import is_ray_wanted

LIMITS = {
    "temporal": HealthLimits(probe_seconds=15, start_seconds=600),  # its program may have to be built
    "temporal-ui": HealthLimits(interval_seconds=10, failing_seconds=120),
    "gateway": HealthLimits(probe_seconds=20, failing_seconds=90),
    "ray": HealthLimits(failing_seconds=90),
    "engine": HealthLimits(probe_seconds=60, failing_seconds=180, start_seconds=3600),
    "learner": HealthLimits(failing_seconds=300, start_seconds=600),
    "worker": HealthLimits(probe_seconds=15),
}
"""Limits of the parts that differ from the defaults of HealthLimits."""

NEEDS = {
    "temporal": ("postgres",),
    "temporal-ui": ("temporal",),
    "engine": ("postgres",),
    "adapter": ("postgres",),
    "learner": ("postgres", "ray"),
    "worker": ("postgres", "temporal"),
    VIEWER: ("postgres",),
}
"""Part → the parts without which it cannot answer."""


def limits_of(part: str) -> HealthLimits:
    """Return a part's limits; those of `engine` are every engine's, if it has none of its own."""
    return LIMITS.get(part) or LIMITS.get(part_kind(part)) or HealthLimits()


_RESTART_HELPS = ("57", "58", "XX")
"""Classes of errors of a Postgres that is stuck while it starts or ends, or is damaged in memory."""
_RUNS_NEED = frozenset({"gateway", "ray", "engine", "adapter", "egress", "learner", "worker"})
"""Parts without which a run cannot go on. Without Postgres or Temporal nothing can be decided, so nothing is paused."""


def is_missed(part: str, health: Mapping[str, PartHealth]) -> bool:
    """Return whether runs cannot go on without a given-up part: of engines, only if none of their set is left."""
    engine_set = set_of_part(part)
    if engine_set is None:
        return part in _RUNS_NEED
    of_set = [one for name, one in health.items() if set_of_part(name) == engine_set]
    return all(one.state is HealthState.GIVEN_UP for one in of_set)


_BOX_SECONDS = 60.0
_POLL_SECONDS = 180.0
"""Age of a worker's newest poll above which it does not poll; one poll lasts up to a minute."""
_LEARNER_SECONDS = 60.0
_LEARNER_START_SECONDS = 180.0
"""The time, after a run first wants a learner, in which its ranks may still be starting."""
_ADAPTER_SECONDS = 30.0
_TOKENS_METRIC = "vllm:generation_tokens_total"


class ProbeFailedError(RatchetError):
    """The part answered, and the answer shows that it does not do its work.

    `restart_helps` False: only a person can change what stops it. `is_late`: a sign of life is missing, which a part
    that gets little CPU gives late.
    """

    def __init__(self, message: str, restart_helps: bool = True, is_late: bool = False) -> None:
        super().__init__(message)
        self.restart_helps = restart_helps
        self.is_late = is_late


def is_late(error: BaseException | None) -> bool:
    """Return whether a probe ended because no answer, or no other sign of life, came within its time."""
    if isinstance(error, ProbeFailedError):
        return error.is_late
    if isinstance(error, RPCError):
        return error.status in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
    return isinstance(error, TimeoutError | httpx.TimeoutException) or (error is not None and is_late(error.__cause__))


class Probes:
    """The probes of one stack. `pid_of` returns the process id of a running part, None if it does not run."""

    def __init__(self, stack: Stack, settings: TemporalSettings, pid_of: Callable[[str], int | None]) -> None:
        self.stack = stack
        self.environment = stack.environment()
        self.settings = settings.model_copy(update={"address": self.environment["TEMPORAL_ADDRESS"]})
        self.pid_of = pid_of
        self.http = httpx.AsyncClient(trust_env=False, timeout=60)
        self.database = Database(self.environment["RATCHET_DATABASE_URL"], pool_size=1)
        self.engines = {
            name: EngineClient(address, timeout_seconds=60) for name, address in engine_addresses(stack).items()
        }
        self.num_tokens: dict[str, float | None] = {}
        self.generated: set[str] = set()
        self.wanted_since: dict[str, float] = {}
        self.box_at: dict[str, float] = {}
        self.has_open_run = True
        self.ray_wanted_at = time.monotonic()
        self.client: Client | None = None

    def of(self, part: str) -> Callable[[], Awaitable[str]] | None:
        """Return the probe of a part, or None if its process's life is all that is known of it."""
        probes: dict[str, Callable[[], Awaitable[str]]] = {
            "postgres": self.postgres,
            "temporal": self.temporal,
            "temporal-ui": self.temporal_ui,
            "gateway": self.gateway,
            "ray": self.ray,
            "adapter": self.adapter,
            "learner": self.learner,
            "worker": self.worker,
            VIEWER: self.viewer,
        }
        if part in self.engines:
            return partial(self.engine_token, part)
        if url := self.stack.box_gateways().get(part):
            return partial(self.gateway, url)
        return probes.get(part)

    async def postgres(self) -> str:
        url = libpq_url(self.environment["RATCHET_DATABASE_URL"])
        try:
            connection = await asyncpg.connect(url, timeout=LIMITS.get("postgres", HealthLimits()).probe_seconds)
        except asyncpg.PostgresError as error:  # it lives: all connections are taken, or a setting refuses them
            helps = (error.sqlstate or "")[:2] in _RESTART_HELPS
            raise ProbeFailedError(f"it refuses connections: {error}", restart_helps=helps) from error
        try:
            row = await connection.fetchrow(
                "SELECT current_setting('transaction_read_only'), current_setting('server_version'),"
                " pg_logical_emit_message(true, 'ratchet', 'probe')"
            )
        finally:
            connection.terminate()
        if row[0] != "off":
            raise ProbeFailedError(
                "it accepts no writes: default_transaction_read_only is on, or it is a standby", restart_helps=False
            )
        return f"postgres {row[1]}"

    async def temporal(self) -> str:
        client = await self._client()
        service = client.workflow_service
        version = (await service.get_system_info(GetSystemInfoRequest())).server_version
        await service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
        request = ListWorkflowExecutionsRequest(namespace=client.namespace, page_size=1)
        await service.list_workflow_executions(request)
        await self._pollers(self.settings.own("control"), TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW)
        return f"temporal {version}"

    async def _client(self) -> Client:
        if self.client is None:
            self.client = await temporal_client.connect_temporal(self.settings, wait_seconds=0)
        return self.client

    async def temporal_ui(self) -> str:
        for path in ("/", "/api/v1/settings"):
            (await self.http.get(self.stack.temporal_ui + path, follow_redirects=True)).raise_for_status()
        return self.stack.temporal_ui

    async def gateway(self, url: str = "") -> str:
        known = {**os.environ, **self.environment}  # a gateway on another host is known by this process's environment
        provider = E2BProvider(known["E2B_API_KEY"], url or known["E2B_API_URL"], url or known["E2B_SANDBOX_URL"])
        boxes = await provider.list({})
        if (url or not self.stack.has_box_host) and time.monotonic() - self.box_at.get(url, 0.0) > _BOX_SECONDS:
            try:
                box = await provider.create("host", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex)
                try:
                    await box.exec("true")
                finally:
                    await box.kill()
            except SandboxFullError:
                pass
            self.box_at[url] = time.monotonic()
        return f"{len(boxes)} boxes"

    async def ray(self) -> str:
        now = time.monotonic()
        if not is_ray_wanted(self.stack.home):
            self.ray_wanted_at = now
            return "starts when a run wants a learner"
        try:
            return await self._ray_node()
        except httpx.ConnectError:
            if now - self.ray_wanted_at > HealthLimits().start_seconds:
                raise
            return "starts"

    async def _ray_node(self) -> str:
        reply = await self.http.get(f"http://127.0.0.1:{self.stack.ports['ray_agent']}/api/local_raylet_healthz")
        if reply.status_code != 200:
            raise ProbeFailedError(f"its node is not healthy: {reply.text[:200]}")
        return "node healthy"

    async def viewer(self) -> str:
        (await self.http.get(self.stack.viewer_address + "/health")).raise_for_status()
        return "answers from the store"

    async def engine_token(self, part: str) -> str:
        engine = self.engines[part]
        address = engine.address
        rows = await self.database.read(engines.list_all_engines)
        row = next((row for row in rows if row.address == address), None)
        if row is None or row.state is EngineState.STARTING:
            raise ProbeFailedError((row and row.fetch_error) or "vLLM loads its model")
        version = row.version or "initial weights"
        if row.fetch_error:
            version = f"{version}; waits for newer weights: {row.fetch_error}"
        if row.state is EngineState.SYNCING and row.silent_seconds < engines.SILENT_SECONDS:
            return f"{version}; new weights are being loaded"
        if row.state is not EngineState.READY:
            raise ProbeFailedError(f"it is {row.state}")
        process = f"{part} {self.pid_of(part)}"
        if not self.has_open_run and row.silent_seconds < engines.SILENT_SECONDS and process in self.generated:
            return version  # after each token vLLM's worker uses a whole core for a second
        before = self.num_tokens.get(part)
        found = await self._num_tokens(address)
        if found is None or found == before or before is None:
            await engine.generate([1], Sampling(max_tokens=1, temperature=1.0), f"probe-{uuid.uuid4().hex}")
            if found is not None:
                found += 1  # its own token is no sign of life next time
            self.generated.add(process)
        self.num_tokens[part] = found
        return version

    async def _num_tokens(self, address: str) -> float | None:
        """Return vLLM's count of generated tokens; None if it shows none."""
        reply = await self.http.get(address + "/metrics")
        rows = [line for line in reply.text.splitlines() if line.startswith(_TOKENS_METRIC)] if reply.is_success else []
        return sum(float(line.rpartition(" ")[2]) for line in rows) if rows else None

    async def adapter(self) -> str:
        url = self.stack.addresses()["adapter"] + "/v1/models"
        reply = await self.http.get(url, headers={"authorization": f"Bearer probe-{uuid.uuid4().hex}"})
        if reply.status_code != 401:
            raise ProbeFailedError(f"a call with an unknown token got {reply.status_code}: {reply.text[:200]}")
        async with self.database.begin() as connection:
            seconds = await connection.scalar(select(seconds_since(InstallationTable.adapter_seen_at)))
            wait = await lock_waits.longest_lock_wait(connection)
        pid = self.pid_of("adapter")  # a heartbeat of the process before it says nothing
        lived = time.time() - psutil.Process(pid).create_time() if pid is not None else _ADAPTER_SECONDS
        if seconds is None or seconds > min(lived, _ADAPTER_SECONDS):
            if wait is not None:  # a new process would wait, too
                raise ProbeFailedError(f"Postgres: {wait.sentence()}", restart_helps=False)
            raise ProbeFailedError("it has not loaded its output parsers, or sends no heartbeat", is_late=True)
        return "answers from the store"

    async def learner(self) -> str:
        async with self.database.begin() as connection:
            wanted = await learners.runs_wanting_learner(connection)
            found = {run_id: await learners.get_learner(connection, run_id) for run_id in wanted}
            opened = await open_runs.open_sets(connection)
        self.has_open_run = bool(opened)
        if not wanted:
            return "no run needs a learner"
        now = time.monotonic()
        self.wanted_since = {run_id: self.wanted_since.get(run_id, now) for run_id in wanted}
        silent = [run_id for run_id, row in found.items() if row is None or row.silent_seconds > _LEARNER_SECONDS]
        failing = [run_id for run_id in silent if now - self.wanted_since[run_id] > _LEARNER_START_SECONDS]
        if failing:
            raise ProbeFailedError(f"no heartbeat of the learner of {', '.join(failing)}", is_late=True)
        return "; ".join(
            f"{run_id}: " + ("its ranks start" if row is None or run_id in silent else f"step {row.step}, {row.phase}")
            for run_id, row in found.items()
        )

    async def worker(self) -> str:
        identity = f"{self.pid_of('worker')}@{socket.gethostname()}"
        ages: dict[str, float] = {}
        for queue in QUEUES:
            kinds = [TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY]
            kinds += [TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW] if queue == "control" else []
            for kind in kinds:
                for poller in await self._pollers(self.settings.own(queue), kind):
                    if poller.identity == identity:
                        age = time.time() - poller.last_access_time.ToSeconds()
                        ages[queue] = min(age, ages.get(queue, age))
        if not ages or min(ages.values()) > _POLL_SECONDS:
            try:
                await temporal_namespace.require_payload_keys(await self._client(), self.settings)
            except PayloadKeyError as error:
                raise ProbeFailedError(str(error), restart_helps=False) from None
        if not ages:
            raise ProbeFailedError(f"no poll of {identity} is known to Temporal", is_late=True)
        if min(ages.values()) > _POLL_SECONDS:
            raise ProbeFailedError(f"its last poll was {min(ages.values()):.0f} s ago", is_late=True)
        # A queue whose slots are all taken is not polled; that is work, no failure.
        idle = [queue for queue in QUEUES if ages.get(queue, _POLL_SECONDS + 1) > _POLL_SECONDS]
        return "polls its queues" + (f"; full: {', '.join(idle)}" if idle else "")

    async def _pollers(self, queue: str, kind: Any) -> Any:
        client = await self._client()
        request = DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
        reply = await client.workflow_service.describe_task_queue(request)
        return reply.pollers

    async def close(self) -> None:
        await self.http.aclose()
        for engine in self.engines.values():
            await engine.close()
        await self.database.close()
