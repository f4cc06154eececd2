"""A run whose evaluations and groups are ended by hand, or are lost although they count as running."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import delete, select, update
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.service import RPCError

from store.schema import BatchItemTable, EvaluationTable, RolloutGroupTable, RolloutTable, RunTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import TASK, Training, training

pytestmark = pytest.mark.timeout(600)
__all__ = ["training"]


class Evaluating:
    """A run whose first evaluation has one rollout, whose agent's first call is held. No learner runs."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.run_id = f"evaluating-{uuid4().hex[:8]}"
        self.run = loop.client.get_workflow_handle(f"run/{self.run_id}")

    async def begin(self) -> None:
        await self.loop.script(*["I give up."] * 20, hold=self.run_id)
        path = self.loop.dataset(**TASK, eval_cmd="false")
        config = {
            "model": str(self.loop.model),
            "datasets": [{"path": path}, {"path": path, "use": "eval"}],
            "grading": {"admission": "ignored"},
            "training": {
                "steps": 1,
                "groups_per_step": 1,
                "group_size": 2,
                "max_groups_seen": 1,
                "min_groups": 1,
                "max_replacements": 20,
            },
            "limits": {"agent_seconds": 120, "eval_seconds": 20},
            "evaluation": {"at": ["start"], "temperatures": [0.0], "start_temperatures": []},
        }
        await self.loop.client.start_workflow("TrainRun", {"config": config}, id=self.run.id, task_queue="control")

    async def evaluation(self) -> WorkflowHandle[Any, Any]:
        """Return the evaluation's workflow as soon as an execution of it runs and its agent works."""

        async def begun() -> Any:
            async with self.loop.database.begin() as connection:
                statement = select(EvaluationTable.label).where(EvaluationTable.run_id == self.run_id)
                label = (await connection.execute(statement)).scalar_one_or_none()
            handle = self.loop.client.get_workflow_handle(f"evaluate/{self.run_id}/{label}")
            try:
                is_running = (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
            except RPCError:
                return None
            rows = [row for row in await self.rollouts("eval") if row.outcome is None and row.claimed_at is not None]
            return handle if is_running and rows else None

        found: WorkflowHandle[Any, Any] = await self.loop.until(begun, "the evaluation's agent works")
        return found

    async def rollouts(self, purpose: str) -> list[Any]:
        async with self.loop.database.begin() as connection:
            statement = select(RolloutTable.id, RolloutTable.outcome, RolloutTable.claimed_at)
            mine = statement.where(RolloutTable.run_id == self.run_id, RolloutTable.purpose == purpose)
            return list(await connection.execute(mine.order_by(RolloutTable.id)))

    async def has_ended(self) -> bool:
        async with self.loop.database.begin() as connection:
            statement = select(EvaluationTable.ended_at).where(EvaluationTable.run_id == self.run_id)
            return (await connection.execute(statement)).scalar_one() is not None

    async def row(self) -> Any:
        async with self.loop.database.begin() as connection:
            return (await connection.execute(select(RunTable).where(RunTable.run_id == self.run_id))).one()


@pytest.fixture
async def evaluating(loop: Loop) -> AsyncIterator[Evaluating]:
    found = Evaluating(loop)
    await found.begin()
    yield found
    await loop.release(found.run_id)
    await found.run.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(found.run, 240)

    async def nothing_runs() -> bool:
        rows = [*await found.rollouts("eval"), *await found.rollouts("train")]
        return all(row.outcome is not None or row.claimed_at is None for row in rows)

    await loop.until(nothing_runs, "every rollout of the cancelled run has ended")
    await loop.forget_script()


async def test_a_cancelled_evaluation_ends_and_the_run_goes_on(evaluating: Evaluating, loop: Loop) -> None:
    handle = await evaluating.evaluation()
    await handle.cancel()

    async def is_cancelled() -> bool:
        return [row.outcome for row in await evaluating.rollouts("eval")] == ["cancelled"]

    await loop.until(is_cancelled, "the evaluation's rollout is cancelled")
    await loop.until(evaluating.has_ended, "the evaluation has ended")
    assert (await evaluating.row()).state == "running"


async def test_an_evaluation_that_is_terminated_again_and_again_pauses_the_run(
    evaluating: Evaluating, loop: Loop
) -> None:
    for _ in range(5):
        handle = await evaluating.evaluation()
        await handle.terminate("in the UI")

    async def is_paused() -> bool:
        return str((await evaluating.row()).state) == "paused"

    await loop.until(is_paused, "the run is paused")
    assert "has been terminated 5 times" in (await evaluating.row()).state_reason


async def test_a_group_whose_workflow_has_ended_although_its_row_is_open(training: Training, loop: Loop) -> None:
    """As after the failover to a replica that lacked the last commits: it is settled once more, nothing runs twice."""
    await loop.until(training.working, "both agents work")
    await training.let_go()

    async def is_settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(is_settled, "the group is settled")
    before = [(row.id, row.outcome, row.num_turns) for row in (await training.rows())[:2]]
    group = loop.client.get_workflow_handle(f"group/{training.run_id}/0")
    await loop.result(group)
    async with loop.database.begin() as connection:
        mine = RolloutGroupTable.workflow_id == group.id
        of_group = select(RolloutGroupTable.id).where(mine).scalar_subquery()
        await connection.execute(select(RolloutGroupTable.id).where(mine).with_for_update())
        await connection.execute(delete(BatchItemTable).where(BatchItemTable.group_id == of_group))
        reopen = update(RolloutGroupTable).where(mine)
        await connection.execute(reopen.values(state="open", ready_at=None, ready_seq=None))
    await loop.until(is_settled, "the group is settled once more")
    assert [(row.id, row.outcome, row.num_turns) for row in (await training.rows())[:2]] == before
