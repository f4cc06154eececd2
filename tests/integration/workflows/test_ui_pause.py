"""A person pauses and unpauses workflows and activities in the Temporal UI: nothing is ended, and nothing is lost.

Pausing is a feature of Temporal's server, which `stack/temporal` switches on.
"""

from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflowservice.v1 import (
    PauseActivityRequest,
    PauseWorkflowExecutionRequest,
    UnpauseActivityRequest,
    UnpauseWorkflowExecutionRequest,
)

from ratchet.temporal_client import WorkflowState, describe_workflow
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training, training
from tests.integration.workflows.test_pauses import Operator, operator

pytestmark = pytest.mark.timeout(600)
__all__ = ["operator", "training"]


class PauseButton:
    """The UI's buttons for one workflow."""

    def __init__(self, loop: Loop, workflow_id: str) -> None:
        self.loop = loop
        self.service = loop.client.workflow_service
        self.names = {"namespace": loop.client.namespace, "workflow_id": workflow_id, "reason": "in the UI"}
        self.workflow_id = workflow_id

    async def state(self) -> WorkflowState:
        described = await describe_workflow(self.loop.client, self.workflow_id)
        assert described is not None
        return WorkflowState(described.workflow_execution_info.status)

    async def pause(self) -> None:
        await self.service.pause_workflow_execution(PauseWorkflowExecutionRequest(**self.names))
        assert await self.state() is WorkflowState.PAUSED

    async def unpause(self) -> None:
        await self.service.unpause_workflow_execution(UnpauseWorkflowExecutionRequest(**self.names))


async def _outcomes(training: Training, count: int) -> list[str | None]:
    return [row.outcome for row in (await training.rows())[:count]]


async def _until_settled(training: Training, loop: Loop) -> None:
    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")


async def test_a_paused_rollout_is_not_swept_and_goes_on(operator: Operator, training: Training, loop: Loop) -> None:
    button = PauseButton(loop, (await training.rows())[0].workflow_id)
    await button.pause()
    await training.let_go()

    async def other_is_graded() -> bool:
        return await _outcomes(training, 2) == [None, "graded"]

    await loop.until(other_is_graded, "the other member is graded")
    swept = await operator.sweep()
    assert swept.rollouts_ended == 0
    assert await _outcomes(training, 2) == [None, "graded"]
    await button.unpause()
    await _until_settled(training, loop)
    assert await _outcomes(training, 2) == ["graded", "graded"]


async def test_a_paused_group_is_not_started_again(operator: Operator, training: Training, loop: Loop) -> None:
    """Its members go on, and the last one settles it."""
    button = PauseButton(loop, f"group/{training.run_id}/0")
    await button.pause()
    assert (await operator.sweep()).rollouts_ended == 0
    await training.let_go()
    await _until_settled(training, loop)
    assert await _outcomes(training, 2) == ["graded", "graded"]
    assert await button.state() is WorkflowState.PAUSED
    await button.unpause()
    await loop.result(loop.client.get_workflow_handle(button.workflow_id))


async def test_a_paused_run_starts_nothing_and_is_not_restarted(
    operator: Operator, training: Training, loop: Loop
) -> None:
    button = PauseButton(loop, f"run/{training.run_id}")
    await button.pause()
    await training.let_go()
    await _until_settled(training, loop)
    num_rows = len(await training.rows())
    assert (await operator.sweep()).runs_restarted == 0
    assert await button.state() is WorkflowState.PAUSED
    assert len(await training.rows()) == num_rows
    await button.unpause()

    async def goes_on() -> bool:
        return len(await training.rows()) > num_rows

    await loop.until(goes_on, "a new group is made")


async def test_a_paused_agent_stage_takes_its_agent_up_again(training: Training, loop: Loop) -> None:
    """The agent works on in its box meanwhile."""
    await loop.until(training.working, "both members have begun")
    workflow_id = (await training.rows())[0].workflow_id
    names: dict[str, Any] = {
        "namespace": loop.client.namespace,
        "execution": WorkflowExecution(workflow_id=workflow_id),
        "type": "agent",
    }
    service = loop.client.workflow_service

    async def agent_stage() -> int | None:
        """Return Temporal's state of the stage; None before it is scheduled."""
        described = await describe_workflow(loop.client, workflow_id)
        assert described is not None
        return next((one.state for one in described.pending_activities if one.activity_type.name == "agent"), None)

    async def started() -> bool:
        return await agent_stage() == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED

    async def paused() -> bool:
        return await agent_stage() == PendingActivityState.PENDING_ACTIVITY_STATE_PAUSED

    await loop.until(started, "the agent works")
    await service.pause_activity(PauseActivityRequest(**names, reason="in the UI"))
    await loop.until(paused, "the activity is paused")
    await training.let_go()

    async def other_is_graded() -> bool:
        return await _outcomes(training, 2) == [None, "graded"]

    await loop.until(other_is_graded, "the other member is graded")
    await service.unpause_activity(UnpauseActivityRequest(**names))
    await _until_settled(training, loop)
    assert await _outcomes(training, 2) == ["graded", "graded"]
    assert (await training.rows())[0].num_turns == 1, "the agent was not started again"
