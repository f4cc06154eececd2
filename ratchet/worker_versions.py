"""Choose the workers' version that gets work, if Temporal routes by version: `worker_versioning` of temporal.yaml.

All workers of an installation are one deployment, and a version is a build id (`stack/build_id.py`). A new version gets
nothing until it is made current; then it gets everything that begins, and every workflow in progress goes over to it
with its next task. An activity in progress ends where it is.
"""

import asyncio

import structlog
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentRequest, SetWorkerDeploymentCurrentVersionRequest
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import WorkerDeploymentConfig

from ratchet.errors import MachineError
from ratchet.temporal_settings import TemporalSettings

_LOG = structlog.get_logger()
_NAME = "ratchet"
_LOOK_SECONDS = 0.5
_NOT_YET = (RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.UNAVAILABLE)
"""Answers while the workers of a version have not polled all queues."""


def worker_deployment(settings: TemporalSettings, build: str) -> WorkerDeploymentConfig:
    """Return the option of a worker that reports its version, and gets its tasks by it if that is configured."""
    routed = settings.worker_versioning
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(settings.own(_NAME), build),
        use_worker_versioning=routed,
        # A pinned workflow would stand still for ever if the last worker of its version was lost. Ours may go over:
        # their histories replay, and payloads of two versions fit (`docs/durability.md`).
        default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE if routed else VersioningBehavior.UNSPECIFIED,
    )


async def make_current(client: Client, settings: TemporalSettings, build: str, wait_seconds: float = 120) -> bool:
    """Let the workers of this version get the work, as soon as they poll; without versioning, workers without one.

    Returns whether that was a change. Raises MachineError if they do not poll within `wait_seconds`.
    """
    wanted = build if settings.worker_versioning else ""
    name = settings.own(_NAME)
    found = await _current_build(client, name, settings.worker_versioning)
    if found == wanted:
        return False
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace,
        deployment_name=name,
        build_id=wanted,
        allow_no_pollers=not wanted,
        ignore_missing_task_queues=not wanted,
    )
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            await client.workflow_service.set_worker_deployment_current_version(request)
        except RPCError as error:
            if error.status not in _NOT_YET or asyncio.get_running_loop().time() > deadline:
                raise MachineError(
                    f"version {wanted or '(none)'} of the workers cannot be made current: {error.message}; once its "
                    "workers poll every queue, run `ratchet up`, or `temporal worker deployment set-current-version "
                    f"--namespace {client.namespace} --deployment-name {name} --build-id {wanted}`"
                ) from error
        else:
            _LOG.info("version of the workers made current", build=wanted or "none", before=found or "none")
            return True
        await asyncio.sleep(_LOOK_SECONDS)


async def _current_build(client: Client, name: str, is_needed: bool) -> str:
    """Return the build id of the deployment's current version, empty if workers without a version get the work.

    Raises RPCError if the server does not say, and it `is_needed`.
    """
    request = DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=name)
    try:
        reply = await client.workflow_service.describe_worker_deployment(request)
    except RPCError as error:
        if is_needed and error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return ""
    return reply.worker_deployment_info.routing_config.current_deployment_version.build_id
