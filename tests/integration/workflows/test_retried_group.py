"""A group that has failed is retried while its run goes on, and a step is trained on it.

All is real except the model's answers and the learner, in whose place the test publishes the step's weights.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError

from client.session import Client
from ratchet.errors import ConfigError
from store import learner_commits, open_rollouts, plans
from store.schema import BatchItemTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training
from tests.integration.workflows.test_pauses import Operator
from tests.integration.workflows.test_rollout import TASK, call

pytestmark = pytest.mark.timeout(600)


class Retried(Training):
    """A run of one step on one group of two, whose first members are held; nothing is replaced by itself."""

    async def begin(self) -> None:
        await self.loop.script("I give up.", "I give up.", hold=self.run_id)
        training = {"steps": 1, "groups_per_step": 1, "group_size": 2, "max_staleness": 0, "max_replacements": 0}
        config = {
            "model": str(self.loop.model),
            "datasets": [{"path": self.loop.dataset(**TASK)}],
            "grading": {"admission": "ignored"},
            "training": training | {"min_groups": 1},
            "limits": {"agent_seconds": 120, "eval_seconds": 20},
            "evaluation": {"at": []},
        }
        await self.loop.client.start_workflow(
            "TrainRun", {"config": config}, id=f"run/{self.run_id}", task_queue="control"
        )

    async def have_called(self) -> bool:
        async with self.loop.database.begin() as connection:
            stages = await open_rollouts.count_open_rollouts(connection, self.run_id)
        return [(one.stage, one.count) for one in stages] == [(open_rollouts.AGENT_WORKS, 2)]

    async def is_in(self, *states: str) -> None:
        async def reached() -> bool:
            return await self.group_state() in states

        await self.loop.until(reached, f"the group is {' or '.join(states)}")

    async def learn(self) -> None:
        """Publish the planned step with the initial weights, and commit its checkpoint, as the learner does."""

        async def planned() -> Any:
            async with self.loop.database.begin() as connection:
                return await plans.unfinished_step(connection, self.run_id)

        weights = str(self.loop.home / "policies" / self.run_id / "0.e0")
        step = await self.loop.until(planned, "the step is planned")
        async with self.loop.database.begin() as connection:
            lease = await learner_commits.take_lease(connection, self.run_id)
            await learner_commits.record_published(connection, lease, step, weights, [], {"loss": 0.0})
            await learner_commits.commit_checkpoint(
                connection, lease, step, "checkpoint", 1, 1, {"checkpoint_seconds": 0.0}
            )

    async def trained(self) -> dict[int, str]:
        """Return group → how the step has used it."""
        async with self.loop.database.begin() as connection:
            used = select(BatchItemTable.group_id, BatchItemTable.use).where(BatchItemTable.run_id == self.run_id)
            return {row.group_id: row.use for row in await connection.execute(used)}


@pytest.fixture
async def retried(loop: Loop) -> AsyncIterator[Retried]:
    found = Retried(loop)
    await found.begin()
    await loop.until(found.have_called, "both agents wait for their first answer")
    yield found
    await found.let_go()
    operator = Operator(loop, found.run_id)
    if await operator.status() is WorkflowExecutionStatus.RUNNING:
        await operator.handle.cancel()
    with contextlib.suppress(WorkflowFailureError):  # the next test's run is refused beside an open one
        await loop.result(operator.handle)
    await loop.forget_script()


async def test_a_failed_group_is_retried_and_trained(retried: Retried, loop: Loop) -> None:
    client = Client(loop.home, by="anna")
    run, group = client.run(retried.run_id), f"group/{retried.run_id}/0"
    run.pause("no other group should take its place")
    for member in await retried.rows():
        client.cancel(member.id)
    await retried.is_in("failed")
    # The member that asks first solves the task, the other one does not.
    await loop.script(call("echo two > a.txt"), "Done.", "Done.")
    assert "run instead of what ended without a verdict" in client.retry(group).text
    with pytest.raises(ConfigError, match="each member has a verdict, is in flight or is replaced"):
        client.retry(group)
    run.resume()
    await retried.is_in("consumed")
    await retried.learn()
    assert await loop.result(loop.client.get_workflow_handle(f"run/{retried.run_id}"), 120) == retried.run_id
    rows = await retried.rows()
    assert [row.outcome for row in rows] == ["cancelled", "cancelled", "graded", "graded"]
    assert list((await retried.trained()).values()) == ["trained"]
    assert run.row().state == "done"
