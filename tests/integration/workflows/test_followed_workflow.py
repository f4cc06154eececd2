"""The messages of a command about a workflow whose activity fails, while the command waits for the result.

The workflow and its activity are stand-ins, so that a test decides what fails when.
"""

from datetime import timedelta
from uuid import uuid4

import pytest
from pydantic import BaseModel
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from client import workflows

_QUEUE = "followed"
_ERRORS: list[str] = []
"""The errors with which the activity fails, first to last; after them it succeeds."""


class _Answer(BaseModel):
    text: str


@activity.defn
async def ask_service() -> None:
    if _ERRORS:
        raise RuntimeError(_ERRORS.pop(0))


@workflow.defn
class Followed:
    @workflow.run
    async def run(self) -> _Answer:
        fast = RetryPolicy(initial_interval=timedelta(seconds=0.5), maximum_interval=timedelta(seconds=0.5))
        await workflow.execute_activity(ask_service, start_to_close_timeout=timedelta(seconds=30), retry_policy=fast)
        return _Answer(text="done")


async def test_what_an_activity_fails_with_is_said_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflows, "_LOOK_SECONDS", 0.1)
    _ERRORS[:] = ["401: the key is wrong, request 7f3a", "401: the key is wrong, request 81c2"] * 2
    said: list[str] = []
    worker = Worker(
        client,
        task_queue=_QUEUE,
        workflows=[Followed],
        activities=[ask_service],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        handle = await client.start_workflow(Followed.run, id=uuid4().hex, task_queue=_QUEUE)
        found = await workflows.follow_workflow(client, handle, "Followed", said.append)
    assert found == _Answer(text="done")
    (line,) = said
    assert line.startswith("ask_service has failed ") and "is tried again: 401: the key is wrong" in line
