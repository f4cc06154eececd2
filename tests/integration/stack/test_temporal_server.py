"""Temporal's own server on the embedded Postgres: lists, kill -9, schema, UI; the dev server."""

import asyncio
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from google.protobuf.json_format import ParseDict
from temporalio import activity, workflow
from temporalio.api.compute.v1 import ComputeConfigScalingGroupUpdate
from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.workflowservice.v1 import (
    CreateWorkerDeploymentRequest,
    CreateWorkerDeploymentVersionRequest,
    DeleteWorkerDeploymentVersionRequest,
    DescribeWorkerDeploymentVersionRequest,
    ValidateWorkerDeploymentVersionComputeConfigRequest,
)
from temporalio.client import Client
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from stack import temporal_build
from stack.temporal_build import find_go
from stack.temporal_server import TemporalKind, installed_temporal_cli, settle_temporal_kind
from tests.standins.slow_proxy import SlowProxy
from tests.temporal_services import TemporalServices, own_server, services

__all__ = ["own_server", "services"]

QUEUE = "test"
ATTRIBUTES: dict[str, Any] = {
    "ratchet_run": "quick-1",
    "ratchet_task": "a/b",
    "ratchet_outcome": "graded",
    "ratchet_harness": "bash_agent",
    "ratchet_reward": 0.5,
    "ratchet_step": 3,
}


@workflow.defn
class Waits:
    """Ends once it is told to."""

    def __init__(self) -> None:
        self.is_over = False

    @workflow.run
    async def run(self) -> str:
        await workflow.wait_condition(lambda: self.is_over)
        return "over"

    @workflow.signal
    def end(self) -> None:
        self.is_over = True


@activity.defn
async def try_number() -> int:
    return activity.info().attempt


@workflow.defn
class Calls:
    """Returns the numbers of the tries that ended three activities."""

    @workflow.run
    async def run(self) -> list[int]:
        limit = timedelta(seconds=150)
        return [await workflow.execute_activity(try_number, start_to_close_timeout=limit) for _ in range(3)]


def _attributes() -> TypedSearchAttributes:
    keys = {str: SearchAttributeKey.for_keyword, float: SearchAttributeKey.for_float, int: SearchAttributeKey.for_int}
    return TypedSearchAttributes(
        [SearchAttributePair(keys[type(value)](name), value) for name, value in ATTRIBUTES.items()]
    )


def _worker(client: Client) -> Worker:
    return Worker(client, task_queue=QUEUE, workflows=[Waits], workflow_runner=UnsandboxedWorkflowRunner())


async def _until_listed(client: Client, query: str, ids: list[str]) -> None:
    """Visibility follows a change within a moment."""
    async with asyncio.timeout(60):
        while (found := sorted([one.id async for one in client.list_workflows(query)])) != ids:
            await asyncio.sleep(0.1)
    assert (await client.count_workflows(query)).count == len(found)


async def test_every_list_that_ratchet_and_its_users_ask_for(own_server: TemporalServices) -> None:
    client = await own_server.client()
    await client.start_workflow(Waits.run, id="one", task_queue=QUEUE, search_attributes=_attributes())
    await client.start_workflow(Waits.run, id="two", task_queue=QUEUE)
    both, one, none = ["one", "two"], ["one"], list[str]()
    own = "TaskQueue = 'test'"  # without the schedule of the sweep
    for query, ids in {
        **{f"{name} = {value!r}": one for name, value in ATTRIBUTES.items()},
        **{f"{own} AND {name} IS NULL": ["two"] for name in ATTRIBUTES},
        "ratchet_run = 'quick-2'": none,
        "ratchet_run = 'quick-1' AND ExecutionStatus = 'Running'": one,
        "ratchet_run = 'quick-1' AND ExecutionStatus = 'Completed'": none,
        "ratchet_task IN ('a/b', 'c')": one,
        "ratchet_run STARTS_WITH 'quick'": one,
        "ratchet_reward > 0.4 AND ratchet_reward <= 0.5": one,
        "ratchet_reward BETWEEN 0.6 AND 1": none,
        "ratchet_step >= 3 OR ratchet_outcome = 'rejected'": one,
        "WorkflowType = 'Waits'": both,
        "WorkflowId STARTS_WITH 't'": ["two"],
        f"{own} AND StartTime > '2020-01-01T00:00:00Z' AND CloseTime IS NULL": both,
        f"{own} AND BuildIds = 'unknown'": none,
        f"{own} AND TemporalReportedProblems IS NULL": both,
    }.items():
        await _until_listed(client, query, ids)
    groups = (await client.count_workflows("GROUP BY ExecutionStatus")).groups
    assert ["Running"] in [list(group.group_values) for group in groups]


async def test_a_slow_store_loses_no_start_of_a_task(own_server: TemporalServices) -> None:
    """The note of a start takes seconds, and Matching waits for it: each activity ends at its first try."""
    url = own_server.stack.environment()["RATCHET_DATABASE_URL"]
    port = own_server.stack.ports["postgres"]
    own_server.end("temporal")
    async with SlowProxy("127.0.0.1", port) as proxy:
        own_server.start("temporal", RATCHET_DATABASE_URL=url.replace(f":{port}/", f":{proxy.port}/"))
        client = await own_server.client()
        async with Worker(
            client,
            task_queue=QUEUE,
            workflows=[Calls],
            activities=[try_number],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            await client.execute_workflow(Calls.run, id="quick", task_queue=QUEUE)
            proxy.delay_seconds = 0.2
            handles = [await client.start_workflow(Calls.run, id=f"slow-{n}", task_queue=QUEUE) for n in range(2)]
            assert [await handle.result() for handle in handles] == [[1, 1, 1]] * 2
        await asyncio.to_thread(own_server.end, "temporal", kill=True)


async def test_kill_9_and_a_restart_of_postgres_lose_no_workflow(own_server: TemporalServices) -> None:
    client = await own_server.client()
    async with _worker(client):
        handles = [await client.start_workflow(Waits.run, id=f"w{n}", task_queue=QUEUE) for n in range(20)]
        for handle in handles[:10]:
            await handle.signal(Waits.end)
        own_server.end("temporal", kill=True)
        own_server.end("postgres", kill=True)
        own_server.start("postgres")
        own_server.start("temporal")
        client = await own_server.client()
        for handle in handles[10:]:
            await client.get_workflow_handle(handle.id).signal(Waits.end)
        assert {await client.get_workflow_handle(handle.id).result() for handle in handles} == {"over"}


async def test_the_schema_is_whole_and_is_not_made_again(own_server: TemporalServices) -> None:
    await own_server.client()
    names = {
        "ratchet_temporal": "schema_version",
        "ratchet_temporal_visibility": "executions_visibility",
    }
    url = own_server.stack.environment()["RATCHET_DATABASE_URL"]
    for database, table in names.items():
        connection = await asyncpg.connect(url.rpartition("/")[0] + "/" + database)
        found = await connection.fetchval("SELECT count(*) FROM schema_update_history")
        assert await connection.fetchval("SELECT to_regclass($1)::text", table) == table
        own_server.end("temporal")
        own_server.start("temporal")
        await own_server.client()
        assert await connection.fetchval("SELECT count(*) FROM schema_update_history") == found
        await connection.close()


async def test_the_ui_shows_the_list(own_server: TemporalServices) -> None:
    client = await own_server.client()
    await client.start_workflow(Waits.run, id="shown", task_queue=QUEUE, search_attributes=_attributes())
    await _until_listed(client, "ratchet_run = 'quick-1'", ["shown"])
    own_server.start("temporal-ui")
    url = f"{own_server.stack.temporal_ui}/api/v1/namespaces/default/workflows"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http, asyncio.timeout(60):
        while True:
            try:
                reply = await http.get(url, params={"query": "ratchet_run = 'quick-1'"})
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        page = await http.get(own_server.stack.temporal_ui, follow_redirects=True)
    assert [row["execution"]["workflowId"] for row in reply.json()["executions"]] == ["shown"]
    assert page.status_code == 200 and "<html" in page.text


async def test_a_version_of_workers_comes_and_goes_without_scaled_workers(own_server: TemporalServices) -> None:
    """The server asks the part that is left out about each version; a compute config, which needs it, is refused."""
    client = await own_server.client()
    service = client.workflow_service
    where = {"namespace": client.namespace, "deployment_name": "own"}
    version = WorkerDeploymentVersion(deployment_name="own", build_id="1")
    named: dict[str, Any] = {"namespace": client.namespace, "deployment_version": version}
    await service.create_worker_deployment(CreateWorkerDeploymentRequest(**where))
    await service.create_worker_deployment_version(CreateWorkerDeploymentVersionRequest(**named))
    described = await service.describe_worker_deployment_version(DescribeWorkerDeploymentVersionRequest(**named))
    assert not described.worker_deployment_version_info.HasField("compute_config")
    groups = {"all": ParseDict({"scalingGroup": {"provider": {"type": "k8s"}}}, ComputeConfigScalingGroupUpdate())}
    request = ValidateWorkerDeploymentVersionComputeConfigRequest(**named, compute_config_scaling_groups=groups)
    with pytest.raises(RPCError, match="this server is built without scaled workers; set TEMPORAL_ADDRESS") as refused:
        await service.validate_worker_deployment_version_compute_config(request)
    assert refused.value.status is RPCStatusCode.INVALID_ARGUMENT
    await service.delete_worker_deployment_version(DeleteWorkerDeploymentVersionRequest(**named))
    with pytest.raises(RPCError) as gone:
        await service.describe_worker_deployment_version(DescribeWorkerDeploymentVersionRequest(**named))
    assert gone.value.status is RPCStatusCode.NOT_FOUND


@pytest.mark.slow
def test_what_the_server_is_built_without_refuses() -> None:
    """`without_test.go`, with the flags of the build. Linking it takes as long as a hundred other tests."""
    if (go := find_go()) is None:
        pytest.skip("Go is not installed")
    command = [go, "test", *temporal_build._FLAGS, "."]
    environment = os.environ | temporal_build._ENVIRONMENT
    done = subprocess.run(
        command, cwd=temporal_build.SOURCES, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_two_stacks_on_one_postgres_do_not_meet(
    own_server: TemporalServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second installation with a database of its own on the same Postgres server."""
    client = await own_server.client()
    await client.start_workflow(Waits.run, id="mine", task_queue=QUEUE)
    url = own_server.stack.environment()["RATCHET_DATABASE_URL"]
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE DATABASE other")
    await connection.close()
    monkeypatch.setenv("RATCHET_DATABASE_URL", url.rpartition("/")[0] + "/other")
    with tempfile.TemporaryDirectory(prefix="ratchet-temporal-", ignore_cleanup_errors=True) as directory:
        other = TemporalServices(Path(directory))
        other.start("temporal")
        try:
            assert [one.id async for one in (await other.client()).list_workflows("TaskQueue = 'test'")] == []
        finally:
            other.end("temporal")


async def test_a_dev_server_goes_on_with_its_workflows(
    services: TemporalServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind is recorded, so a later start needs no setting."""
    if installed_temporal_cli() is None:
        pytest.skip("Temporal's CLI is not installed")
    monkeypatch.setenv("RATCHET_TEMPORAL", "dev")
    assert settle_temporal_kind(services.stack.home, print) is TemporalKind.DEV
    monkeypatch.delenv("RATCHET_TEMPORAL")
    services.start("temporal")
    client = await services.client()
    await client.start_workflow(Waits.run, id="open", task_queue=QUEUE, task_timeout=timedelta(seconds=5))
    services.end("temporal", kill=True)
    services.start("temporal")
    client = await services.client()
    async with _worker(client):
        handle = client.get_workflow_handle("open")
        await handle.signal(Waits.end)
        assert await handle.result() == "over"


def test_the_dev_server_is_one_setting_away(services: TemporalServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_TEMPORAL", "dev")
    (command,) = [part.command for part in services.stack.parts() if part.name.startswith("temporal")]
    assert command == [sys.executable, "-P", "-m", "cli.main", "part", "temporal", "--dev"]
