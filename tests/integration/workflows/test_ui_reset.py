"""Reset, cancel and terminate in the Temporal UI, for what the tests of groups, children and pauses do not show."""

from typing import Any
from uuid import uuid4

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_children import Evaluating, evaluating
from tests.integration.workflows.test_groups import Training, training
from tests.integration.workflows.test_pauses import Operator, operator
from tests.integration.workflows.test_ui_pause import PauseButton

pytestmark = pytest.mark.timeout(600)
__all__ = ["evaluating", "operator", "training"]


async def reset(loop: Loop, workflow_id: str) -> None:
    """Reset an execution to its first workflow task, as the UI's button does."""
    handle = loop.client.get_workflow_handle(workflow_id)
    events = [event async for event in handle.fetch_history_events()]
    kind = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    first = next(event.event_id for event in events if event.event_type == kind)
    await loop.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=loop.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
            reason="in the UI",
            workflow_task_finish_event_id=first,
            request_id=uuid4().hex,
        )
    )


async def _settled(training: Training, loop: Loop) -> list[Any]:
    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    return await training.rows()


@pytest.mark.parametrize("name", ["run/{}", "group/{}/0"], ids=["run", "group"])
async def test_a_run_or_group_that_is_reset_goes_on_with_what_postgres_holds(
    training: Training, loop: Loop, name: str
) -> None:
    """The members work on, none is started twice, and the group is settled by both."""
    await loop.until(training.working, "both agents work")
    await reset(loop, name.format(training.run_id))
    await training.let_go()
    rows = await _settled(training, loop)
    assert [row.outcome for row in rows[:2]] == ["graded", "graded"]
    assert all(row.replaced_by is None for row in rows[:2])
    assert await training.group_state() in ("ready", "consumed")


async def test_a_member_that_is_reset_ends_with_one_verdict(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")
    member = (await training.rows())[0]
    await reset(loop, member.workflow_id)
    await training.let_go()
    rows = await _settled(training, loop)
    assert [row.outcome for row in rows[:2]] == ["graded", "graded"]
    assert rows[0].id == member.id and rows[0].replaced_by is None


async def test_a_cancelled_group_is_never_trained_on_and_another_is_made(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")
    await loop.client.get_workflow_handle(f"group/{training.run_id}/0").cancel()

    async def another_works() -> bool:
        rows = await training.rows()
        return [row.outcome for row in rows[:2]] == ["cancelled", "cancelled"] and len(rows) == 4

    await loop.until(another_works, "another group is made")
    assert await training.group_state() not in ("ready", "consumed")


async def test_a_terminated_member_is_ended_by_the_sweep_and_replaced(
    operator: Operator, training: Training, loop: Loop
) -> None:
    await loop.until(training.working, "both agents work")
    first = (await training.rows())[0]
    await loop.client.get_workflow_handle(first.workflow_id).terminate("in the UI")

    async def is_ended() -> bool:
        await operator.sweep()
        return (await training.rows())[0].outcome is not None

    await loop.until(is_ended, "the sweep ends the member")
    await training.let_go()
    rows = await _settled(training, loop)
    assert rows[0].outcome != "graded" and rows[0].replaced_by == rows[2].id
    assert [row.outcome for row in rows[1:3]] == ["graded", "graded"]


async def test_an_evaluation_that_is_reset_ends_with_every_verdict_once(evaluating: Evaluating, loop: Loop) -> None:
    handle = await evaluating.evaluation()
    await reset(loop, handle.id)
    await loop.release(evaluating.run_id)
    await loop.until(evaluating.has_ended, "the evaluation has ended")
    assert [row.outcome for row in await evaluating.rollouts("eval")] == ["graded"]


async def test_a_paused_evaluation_goes_on_when_it_is_unpaused(evaluating: Evaluating, loop: Loop) -> None:
    handle = await evaluating.evaluation()
    button = PauseButton(loop, handle.id)
    await button.pause()
    await loop.release(evaluating.run_id)

    async def is_graded() -> bool:
        return [row.outcome for row in await evaluating.rollouts("eval")] == ["graded"]

    await loop.until(is_graded, "its rollout goes on")
    assert not await evaluating.has_ended()
    await button.unpause()
    await loop.until(evaluating.has_ended, "the evaluation has ended")
