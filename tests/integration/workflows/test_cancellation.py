"""A cancellation loses no result, also if it comes in the same workflow task as the activity's completion."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError
from temporalio.worker import Worker

from tests.integration.workflows.conftest import Loop

with workflow.unsafe.imports_passed_through():
    from ratchet.payloads import StageOptions
    from workflows.activity_options import run_activity, run_activity_even_if_cancelled, stop_if_cancelled


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    @activity.defn(name="count_call")
    async def count_call(self, number: int) -> int:
        self.calls += 1
        return number


def _options(queue: str) -> StageOptions:
    return StageOptions(
        queue=queue, start_to_close_seconds=30, heartbeat_seconds=None, retry_initial_seconds=1, retry_max_seconds=1
    )


@workflow.defn(sandboxed=False)
class KeepsResult:
    @workflow.run
    async def run(self, queue: str) -> int:
        result = await run_activity_even_if_cancelled(Counter.count_call, 7, _options(queue))
        try:
            stop_if_cancelled()
        except asyncio.CancelledError:
            return result + 1
        return result


@workflow.defn(sandboxed=False)
class Stops:
    @workflow.run
    async def run(self, queue: str) -> int:
        return await run_activity(Counter.count_call, 7, _options(queue))


@pytest.fixture
async def client(loop: Loop) -> AsyncIterator[Client]:
    yield loop.client


async def cancelled_at_completion(client: Client, started: type, counter: Counter) -> WorkflowHandle[object, int]:
    """Run a workflow so that one workflow task brings both the completion of its activity and the cancellation."""
    name = f"cancellation-{uuid4().hex[:8]}"
    deciding = {"task_queue": name, "workflows": [KeepsResult, Stops], "max_cached_workflows": 0}
    async with Worker(client, **deciding):
        handle = await client.start_workflow(
            started.__name__, f"{name}-work", id=name, task_queue=name, result_type=int
        )
        while not (await handle.describe()).raw_description.pending_activities:
            await asyncio.sleep(0.05)
    async with Worker(client, task_queue=f"{name}-work", activities=[counter.count_call]):
        while not counter.calls or (await handle.describe()).raw_description.pending_activities:
            await asyncio.sleep(0.05)
    await handle.cancel()
    async with (
        Worker(client, **deciding),
        Worker(client, task_queue=f"{name}-work", activities=[counter.count_call]),
    ):
        await asyncio.wait({asyncio.ensure_future(handle.result())}, timeout=60)
    return handle


async def test_a_result_that_must_not_be_lost_is_asked_for_again(client: Client) -> None:
    counter = Counter()
    handle = await cancelled_at_completion(client, KeepsResult, counter)
    assert await handle.result() == 8, "it has the result and knows that it is cancelled"
    assert counter.calls == 2


async def test_other_activities_are_not_run_again(client: Client) -> None:
    counter = Counter()
    handle = await cancelled_at_completion(client, Stops, counter)
    with pytest.raises(WorkflowFailureError) as ended:
        await handle.result()
    assert isinstance(ended.value.cause, CancelledError) and counter.calls == 1
