"""Groups and their members under cancellation, termination and restarts."""

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import CancelledError

from ratchet.temporal_client import describe_workflow, root_cause
from store.schema import RolloutGroupTable, RolloutTable, RunTable
from tests.integration.workflows.conftest import Loop

pytestmark = pytest.mark.timeout(600)

TASK = {
    "pre_commands": [
        "git init -q . && echo one > a.txt && git add -A && git -c user.name=x -c user.email=x@x commit -qm first"
    ]
}


class Training:
    """A run of one group of two whose agents' first calls are held; no learner runs."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.run_id = f"groups-{uuid4().hex[:8]}"

    async def begin(self, *answers: str, eval_cmd: str = "false", **training: Any) -> None:
        """Start the run; its first answers are held."""
        await self.loop.script(*(answers or ["I give up."] * 2), hold=self.run_id)
        sizes = {"steps": 1, "groups_per_step": 1, "group_size": 2, "max_groups_seen": 1, "min_groups": 1}
        config = {
            "model": str(self.loop.model),
            "datasets": [{"path": self.loop.dataset(**TASK, eval_cmd=eval_cmd)}],
            "grading": {"admission": "ignored"},
            "training": sizes | training,
            "limits": {"agent_seconds": 120, "eval_seconds": 20},
            "evaluation": {"at": []},
        }
        await self.loop.client.start_workflow(
            "TrainRun", {"config": config}, id=f"run/{self.run_id}", task_queue="control"
        )

    async def rows(self) -> list[Any]:
        async with self.loop.database.begin() as connection:
            statement = select(
                RolloutTable.workflow_id,
                RolloutTable.outcome,
                RolloutTable.num_turns,
                RolloutTable.replaced_by,
                RolloutTable.claimed_at,
                RolloutTable.id,
            )
            return list(
                await connection.execute(statement.where(RolloutTable.run_id == self.run_id).order_by(RolloutTable.id))
            )

    async def working(self) -> list[Any]:
        """Return the rows as soon as two agents work."""
        rows = await self.rows()
        return rows if sum(row.claimed_at is not None and row.outcome is None for row in rows) >= 2 else []

    async def open_workflows(self) -> list[str]:
        """Describe the workflows of the run that have not ended, for a failed test's report."""
        async with self.loop.database.begin() as connection:
            of_groups = select(RolloutGroupTable.workflow_id).where(RolloutGroupTable.run_id == self.run_id)
            groups = (await connection.execute(of_groups)).scalars()
        found = []
        for name in (f"run/{self.run_id}", *groups, *(row.workflow_id for row in await self.rows())):
            described = await describe_workflow(self.loop.client, name)
            if described is not None and described.workflow_execution_info.status == WorkflowExecutionStatus.RUNNING:
                pending = [
                    f"{one.activity_type.name} try {one.attempt} {PendingActivityState.Name(one.state)} "
                    f"since {one.last_started_time.ToDatetime():%X} {one.last_failure.message}"
                    for one in described.pending_activities
                ]
                found.append(f"{name} workflow task {described.pending_workflow_task.attempt} {pending}")
        return found

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 240) -> None:
        """Wait as `Loop.until`; a failure says what the run's workflows wait for."""
        try:
            await self.loop.until(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {await self.open_workflows()}") from None

    async def group_state(self) -> str:
        async with self.loop.database.begin() as connection:
            statement = (
                select(RolloutGroupTable.state)
                .where(RolloutGroupTable.run_id == self.run_id)
                .order_by(RolloutGroupTable.id)
                .limit(1)
            )
            return str((await connection.execute(statement)).scalar_one())

    async def let_go(self) -> None:
        await self.loop.release(self.run_id)

    async def cancel(self) -> None:
        """Cancel the run and wait until its rollouts have ended."""
        await self.let_go()
        handle = self.loop.client.get_workflow_handle(f"run/{self.run_id}")
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as ended:
            await self.loop.result(handle, 240)
        assert isinstance(ended.value.cause, CancelledError), root_cause(ended.value)

        async def nothing_runs() -> bool:
            return all(row.outcome is not None or row.claimed_at is None for row in await self.rows())

        await self.until(nothing_runs, "every rollout of the cancelled run has ended")
        await self.loop.forget_script()
        async with self.loop.database.begin() as connection:
            assert (
                await connection.execute(select(RunTable.state).where(RunTable.run_id == self.run_id))
            ).scalar_one() == "cancelled"


@pytest.fixture
async def training(loop: Loop) -> AsyncIterator[Training]:
    found = Training(loop)
    await found.begin()
    yield found
    await found.cancel()


async def test_a_member_that_is_cancelled_by_hand_is_replaced(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")
    first = (await training.rows())[0]
    await loop.client.get_workflow_handle(first.workflow_id).cancel()

    async def cancelled() -> bool:
        return (await training.rows())[0].outcome == "cancelled"

    await loop.until(cancelled, "the member is cancelled")
    await training.let_go()

    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    rows = (await training.rows())[:3]
    assert [row.outcome for row in rows] == ["cancelled", "graded", "graded"]
    assert rows[0].replaced_by == rows[2].id
    assert await training.group_state() in ("ready", "consumed"), "its two graded members make the group"


async def test_a_terminated_group_is_taken_up_again(training: Training, loop: Loop) -> None:
    """Terminating a group in the UI cancels its members; the run starts it again with members that end."""
    await loop.until(training.working, "both agents work")
    await loop.client.get_workflow_handle(f"group/{training.run_id}/0").terminate("in the UI")

    async def cancelled() -> bool:
        return [row.outcome for row in (await training.rows())[:2]] == ["cancelled", "cancelled"]

    await loop.until(cancelled, "its members are cancelled")
    await training.let_go()

    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    rows = (await training.rows())[:4]
    assert [row.outcome for row in rows] == ["cancelled", "cancelled", "graded", "graded"]
    assert {row.replaced_by for row in rows[:2]} == {row.id for row in rows[2:]}
