"""One worker process: polls its task queues, with activities whose dependencies are made here, once."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import structlog
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.adhoc_rollouts import AdhocRolloutActivities
from activities.admission import AdmitActivities
from activities.agent import AgentActivities
from activities.boot import BootActivities
from activities.claim_and_finalise import RolloutRecordActivities
from activities.diff import DiffActivities
from activities.evaluations import EvaluationActivities
from activities.generate import GenerateActivities
from activities.grade import GradeActivities
from activities.group_members import GroupRecordActivities
from activities.harnesses.registry import Harnesses
from activities.image_builds import ImageBuildActivities, ImageBuilds
from activities.learning import LearnActivities
from activities.regrade import RegradeActivities
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from activities.sandbox_probe import SandboxProbe
from activities.stage_telemetry import StageTelemetry
from activities.sweep import SweepActivities
from activities.worker_lateness import WorkerLateness
from activities.workspace import WorkspaceActivities
from grading.registry import GRADERS
from ratchet import paths, temporal_client
from ratchet.background_task import running_beside, stop_event
from ratchet.payload_codec import codec_of
from ratchet.temporal_settings import TemporalSettings
from ratchet.worker_versions import worker_deployment
from sandboxes.registry import adapter_url, image_builder, sandbox_provider
from stack import temporal_namespace
from stack.agent_programs import lay_out_tarballs
from stack.build_id import build_id
from stack.orphaned_tries import end_orphaned_tries, note_worker
from store import installations
from store.database import Database
from store.migration import wait_for_schema
from workflows.admit_tasks import AdmitTasks
from workflows.build_image import BuildImage
from workflows.evaluate import Evaluate
from workflows.regrade import Regrade
from workflows.rollout import Rollout
from workflows.rollout_group import RolloutGroup
from workflows.sweep import Sweep
from workflows.train_run import TrainRun

_LOG = structlog.get_logger()

_HEARTBEAT_INTERVAL = timedelta(seconds=5)
_LOOK_SECONDS = 1.5
_AWAY_LOOKS = 2
"""Looks in a row at which Temporal is away, after which it may have been put back to an older state."""
_TEMPORAL_SECONDS = 600.0
"""The first start of Temporal's server on a busy machine takes minutes."""

WORKFLOWS = [Rollout, RolloutGroup, TrainRun, Evaluate, Sweep, AdmitTasks, Regrade, BuildImage]


def _activities(
    client: Client, database: Database, settings: TemporalSettings, configs: RunConfigs, lateness: WorkerLateness
) -> dict[str, list[Callable[..., Any]]]:
    """Return queue → its activities."""
    provider = sandbox_provider()
    harnesses = Harnesses()
    builds = ImageBuilds(client, settings)
    boot = BootActivities(database, provider, configs, builds, lateness)
    record = RolloutRecordActivities(database, settings, configs)
    group = GroupRecordActivities(database, settings, configs)
    evaluation = EvaluationActivities(database, settings, configs)
    adhoc = AdhocRolloutActivities(database, settings)
    run = RunActivities(database, settings, configs, client, SandboxProbe(provider, adapter_url()))
    learn = LearnActivities(database, configs)
    admit = AdmitActivities(database, provider, settings, builds)
    grade = GradeActivities(database, provider, configs, GRADERS)
    workspace = WorkspaceActivities(database, provider, configs)
    agent = AgentActivities(database, provider, configs, harnesses, adapter_url())
    diff = DiffActivities(database, provider, configs, harnesses, GRADERS)
    regrade = RegradeActivities(database, settings, configs)
    sweep = SweepActivities(database, provider, settings, client)
    return {
        "control": [
            *(record.claim, record.finalise, adhoc.prepare_rollout),
            *(group.plan_group, group.replace_member, group.settle_group, group.cancel_group),
            *(run.prepare_run, run.advance_run, run.find_running_groups, run.pause_run),
            *(run.end_run, run.steer_run, run.steer_target),
            *(evaluation.begin_evaluation, evaluation.end_evaluation),
            *(learn.plan, boot.release, sweep.sweep),
            *(admit.admit_page, admit.record_admission, regrade.regrade_page, regrade.settle_regrade),
        ],
        "boot": [boot.boot],
        "agent": [
            *(workspace.workspace, agent.agent, diff.diff),
            GenerateActivities(boot, workspace, agent, diff, grade).generate,
        ],
        "grade": [boot.boot, grade.grade, grade.control_run, admit.admit_trial],
        "learn": [learn.step, learn.find_engines, learn.sync],
        "image": [ImageBuildActivities(database, image_builder()).build_image],
    }


def slots(queue: str, settings: TemporalSettings) -> int:
    """Return how many activities of `queue` one worker process runs at once."""
    wanted = settings.queues[queue].slots
    return max(1, wanted // settings.boot_workers) if queue == "boot" else wanted


def _runtime() -> Runtime:
    """Return a runtime that serves the SDK's metrics for Prometheus at RATCHET_WORKER_METRICS, if that is set."""
    # Without a logger, the SDK's core writes lines of its own form to standard output.
    core = LogForwardingConfig(logging.getLogger("temporalio.core"), append_target_to_name=False)
    logs = LoggingConfig(TelemetryFilter(core_level="WARN", other_level="ERROR"), forwarding=core)
    address = os.environ.get("RATCHET_WORKER_METRICS")
    if address:
        try:
            return Runtime(telemetry=TelemetryConfig(logging=logs, metrics=PrometheusConfig(bind_address=address)))
        except (RuntimeError, ValueError) as error:  # another worker of this machine serves its metrics there
            _LOG.warning("no metrics of this worker", address=address, reason=str(error))
    return Runtime(telemetry=TelemetryConfig(logging=logs))


async def run_worker(queues: Sequence[str], settings: TemporalSettings, database_url: str) -> None:
    """Run until SIGTERM or SIGINT. Activities are cancelled then; another worker retries those that cannot end."""
    database = Database(database_url, settings.postgres.worker_pool_size)
    await wait_for_schema(database)
    stopping = stop_event()
    client = await temporal_client.connect_temporal(settings, wait_seconds=_TEMPORAL_SECONDS, runtime=_runtime())
    await temporal_namespace.wait_for_namespace(client, database)
    installation = await database.run(installations.installation_id)
    if "agent" in queues:
        await asyncio.to_thread(lay_out_tarballs, lambda text: _LOG.info("agent programs", what=text))
    configs = RunConfigs(database, settings)
    note_worker(paths.home())
    lateness = WorkerLateness()
    activities = _activities(client, database, settings, configs, lateness)
    deployment = worker_deployment(settings, build_id())

    def worker(queue: str) -> Worker:
        return Worker(
            client,
            task_queue=settings.own(queue),
            workflows=WORKFLOWS if queue == "control" else [],
            activities=activities[queue],
            interceptors=[StageTelemetry(installation, configs, lateness)],
            max_concurrent_activities=slots(queue, settings),
            max_concurrent_local_activities=slots(queue, settings),
            # The SDK's sandbox reads the workflows' files again, which fails once the checkout has been updated, and is
            # entered six times per payload. `tests/replay` uses it, which finds what a workflow may not call.
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_cached_workflows=settings.max_cached_workflows,
            deployment_config=deployment,
            graceful_shutdown_timeout=temporal_client.GRACEFUL_SHUTDOWN,
            # The SDK's default is four fifths of the heartbeat timeout, too close to it on a busy machine.
            max_heartbeat_throttle_interval=_HEARTBEAT_INTERVAL,
            default_heartbeat_throttle_interval=_HEARTBEAT_INTERVAL,
        )

    while not stopping.is_set():
        await temporal_namespace.wait_for_payload_keys(client, settings, stopping)
        async with contextlib.AsyncExitStack() as stack:
            for queue in queues:
                if queue != "control":
                    await stack.enter_async_context(worker(queue))
            await stack.enter_async_context(running_beside(lateness.follow()))
            await stack.enter_async_context(running_beside(end_orphaned_tries(client, settings, paths.home())))
            _LOG.info("worker ready", queues=list(queues))
            # Without the key of a payload it takes no more work, because each task would fail.
            ends = (stopping, codec_of(client.data_converter).is_refused)
            await (_decide(client, lambda: worker("control"), *ends) if "control" in queues else _first_of(*ends))
    await database.close()


async def _decide(client: Client, make_worker: Callable[[], Worker], *ends: asyncio.Event) -> None:
    """Run the worker of the workflows until one of `ends`. It begins anew after each outage of Temporal, with an empty
    cache: an older state may have been put back meanwhile, and a cached workflow would not see what follows there."""
    while not any(end.is_set() for end in ends):
        try:
            await _decide_until_away(client, make_worker(), *ends)
        except RuntimeError:  # no worker begins while Temporal is away
            if not await _is_away(client):
                raise
        while not any(end.is_set() for end in ends) and await _is_away(client):
            await asyncio.sleep(_LOOK_SECONDS)


async def _decide_until_away(client: Client, worker: Worker, *ends: asyncio.Event) -> None:
    """Run the worker until Temporal is away or one of `ends` is set. Raises RuntimeError if it cannot work."""
    away = asyncio.Event()
    running = asyncio.ensure_future(worker.run())
    running.add_done_callback(lambda _: away.set())
    try:
        async with running_beside(_note_outage(client, away)):
            await _first_of(away, *ends)
    finally:
        await worker.shutdown()
    await running


async def _note_outage(client: Client, away: asyncio.Event) -> None:
    num_away = 0
    while num_away < _AWAY_LOOKS:
        await asyncio.sleep(_LOOK_SECONDS)
        num_away = num_away + 1 if await _is_away(client) else 0
    _LOG.warning("Temporal is away: workflows begin with an empty cache when it answers")
    away.set()


async def _is_away(client: Client) -> bool:
    """Return whether Temporal, or a proxy before it, is unavailable; False if it is late or has another error."""
    try:
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    except RPCError as error:
        return error.status is RPCStatusCode.UNAVAILABLE
    return False


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
