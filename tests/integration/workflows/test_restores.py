"""Temporal or the store is put back to an older state than the other: the run goes on.

The histories that no worker can go on with are made by hand: a command that the workflow has not given.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import uuid4

import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import select, text
from temporalio.api.command.v1 import Command, StartTimerCommandAttributes
from temporalio.api.enums.v1 import CommandType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    PollWorkflowTaskQueueRequest,
    RespondWorkflowTaskCompletedRequest,
    RespondWorkflowTaskFailedRequest,
)
from temporalio.service import RPCError
from temporalio.testing import ActivityEnvironment

from activities.sweep import SweepActivities
from ratchet import temporal_client
from ratchet.sweep_payloads import SweepInput, SweepResult
from stack import backup
from store.schema import RunTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training, training

pytestmark = pytest.mark.timeout(900)
__all__ = ["training"]


async def sweep(loop: Loop, dry_run: bool = False) -> SweepResult:
    activities = SweepActivities(loop.database, loop.provider(), loop.settings, loop.client)
    return await ActivityEnvironment().run(activities.sweep, SweepInput(dry_run=dry_run))


async def contradict(loop: Loop, workflow_id: str) -> None:
    """Add a timer to the history that the workflow has not started, and let the worker find it."""
    loop.end("worker")
    await loop.client.get_workflow_handle(workflow_id).signal("wake")
    service, name = loop.client.workflow_service, loop.client.namespace
    attributes = StartTimerCommandAttributes(timer_id="planted", start_to_fire_timeout=Duration(seconds=86_400))
    command = Command(command_type=CommandType.COMMAND_TYPE_START_TIMER, start_timer_command_attributes=attributes)
    queue = TaskQueue(name=loop.settings.own("control"))
    while True:
        request = PollWorkflowTaskQueueRequest(namespace=name, task_queue=queue, identity="test")
        try:
            task = await service.poll_workflow_task_queue(request, timeout=timedelta(seconds=70))
        except RPCError:
            continue
        if not task.task_token:
            continue
        token = {"namespace": name, "task_token": task.task_token, "identity": "test"}
        if task.workflow_execution.workflow_id == workflow_id:
            await service.respond_workflow_task_completed(
                RespondWorkflowTaskCompletedRequest(commands=[command], **token)
            )
            break
        await service.respond_workflow_task_failed(RespondWorkflowTaskFailedRequest(**token))
    await loop.client.get_workflow_handle(workflow_id).signal("wake")
    loop.spawn("worker")


async def until_stuck(loop: Loop, workflow_id: str) -> None:
    async def is_stuck() -> bool:
        pending = await temporal_client.pending_activities(loop.client, workflow_id) or []
        return any("the sweep begins it anew" in one.error for one in pending)

    await loop.until(is_stuck, f"no worker can go on with {workflow_id}")


async def until_reset(loop: Loop, workflow_id: str) -> None:
    """Sweep until the workflow has begun anew; Temporal lists it some seconds after it is stuck."""
    handle = loop.client.get_workflow_handle(workflow_id)
    before = (await handle.describe()).run_id

    async def is_reset() -> bool:
        await sweep(loop)
        return (await handle.describe()).run_id != before

    await loop.until(is_reset, f"{workflow_id} begins anew")


@pytest.mark.parametrize("name", ["run/{}", "member"])
async def test_what_no_worker_can_go_on_with_begins_anew(
    training: Training, loop: Loop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loop.until(training.working, "both agents work")
    before = await training.rows()
    workflow_id = before[0].workflow_id if name == "member" else name.format(training.run_id)
    await contradict(loop, workflow_id)
    await until_stuck(loop, workflow_id)
    first = (await loop.client.get_workflow_handle(workflow_id).describe()).run_id
    await sweep(loop, dry_run=True)
    assert (await loop.client.get_workflow_handle(workflow_id).describe()).run_id == first
    queue = loop.settings.own("control")

    async def is_listed() -> bool:
        return bool([one async for one in loop.client.list_workflows(temporal_client._FAILING.format(queue))])

    await loop.until(is_listed, "Temporal lists it")
    await until_reset(loop, workflow_id)
    if name == "member":
        await contradict(loop, workflow_id)
        await until_stuck(loop, workflow_id)
        await loop.until(is_listed, "Temporal lists it again")
        with monkeypatch.context() as reset_once:
            reset_once.setattr(temporal_client, "_MOST_RESETS", 1)
            assert await temporal_client.reset_contradicted(loop.client, queue) == []
        await until_reset(loop, workflow_id)
    await training.let_go()

    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    rows = await training.rows()
    assert [row.outcome for row in rows[:2]] == ["graded", "graded"]
    assert [row.id for row in rows[:2]] == [row.id for row in before[:2]], "nothing is begun twice"


# ---------------------------------------------------------------- older states, put back


@asynccontextmanager
async def put_back(loop: Loop, *parts: str, databases: list[str]) -> AsyncIterator[None]:
    """Copy the databases before the block and put the copies in their place after it, while `parts` are stopped."""

    async def change(statements: list[str]) -> None:
        for part in reversed(parts):
            loop.end(part)
        async with backup._administration(loop.database.url) as administration:
            for statement in statements:
                await administration.execute(text(statement))
        for part in parts:
            loop.spawn(part)

    copies = {name: f"{name}_{uuid4().hex[:6]}" for name in databases}
    ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"
    copied = [[ends.format(name), f'CREATE DATABASE "{copy}" TEMPLATE "{name}"'] for name, copy in copies.items()]
    await change([statement for pair in copied for statement in pair])
    yield
    await change(
        [
            statement
            for name, copy in copies.items()
            for statement in (
                ends.format(name),
                f'DROP DATABASE "{name}" WITH (FORCE)',
                f'ALTER DATABASE "{copy}" RENAME TO "{name}"',
            )
        ]
    )


async def run_state(training: Training) -> str:
    async with training.loop.database.begin() as connection:
        state = select(RunTable.state).where(RunTable.run_id == training.run_id)
        return str((await connection.execute(state)).scalar_one())


async def begun(loop: Loop) -> Training:
    training = Training(loop)
    await training.begin()
    await loop.until(training.working, "both agents work")
    return training


async def until_graded(loop: Loop, training: Training) -> None:
    await training.let_go()

    async def graded() -> bool:
        return [row.outcome for row in (await training.rows())[:2]] == ["graded", "graded"]

    await loop.until(graded, "both are graded")


async def ends_by_cancel(loop: Loop, training: Training) -> None:
    """Cancel the run, which only a workflow that goes on notices, and sweep until it has ended."""
    handle = loop.client.get_workflow_handle(f"run/{training.run_id}")

    async def ended() -> bool:
        with contextlib.suppress(RPCError):  # it has just ended
            await handle.cancel()
        await sweep(loop)
        await asyncio.sleep(2)
        rows = await training.rows()
        return await run_state(training) == "cancelled" and all(row.outcome or row.claimed_at is None for row in rows)

    await training.until(ended, "the run goes on, and is cancelled", 480)
    await loop.forget_script()


@pytest.mark.slow
async def test_temporal_older_than_the_store_under_living_workers(loop: Loop) -> None:
    """Both agents end while the newer histories are written, which are lost."""
    training = await begun(loop)
    name = loop.database.url.rpartition("/")[2]
    async with put_back(loop, "temporal", databases=[f"{name}_temporal", f"{name}_temporal_visibility"]):
        await temporal_client.connect_temporal(loop.settings, wait_seconds=120)
        await until_graded(loop, training)
    await temporal_client.connect_temporal(loop.settings, wait_seconds=120)
    await ends_by_cancel(loop, training)
    assert [row.outcome for row in (await training.rows())[:2]] == ["graded", "graded"], "their verdicts stay"


@pytest.mark.slow
async def test_the_store_older_than_temporal(loop: Loop) -> None:
    """The store forgets two verdicts, and Temporal holds that their workflows and their group have ended."""
    training = await begun(loop)
    before = await training.rows()
    async with put_back(loop, "adapter", "worker", databases=[loop.database.url.rpartition("/")[2]]):
        await until_graded(loop, training)
    assert [row.outcome for row in (await training.rows())[:2]] == [None, None]

    async def settled() -> bool:
        await sweep(loop)
        return await training.group_state() != "open"

    await training.until(settled, "the group is settled without them", 480)
    rows = (await training.rows())[:2]
    assert [row.outcome for row in rows] == ["infra_failed", "infra_failed"], "no verdict is invented"
    assert [row.id for row in rows] == [row.id for row in before[:2]]
    await ends_by_cancel(loop, training)
