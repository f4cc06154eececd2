"""The executions of a workflow that count as open, and the work of one that is pending."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from ratchet.patience import Patience
from ratchet.temporal_client import WorkflowState, _wait_for_answers, pending_activities


def test_every_state_that_temporal_knows_has_its_own_value_here() -> None:
    known = {name.removeprefix("WORKFLOW_EXECUTION_STATUS_"): value for name, value in WorkflowExecutionStatus.items()}
    assert known.pop("UNSPECIFIED") == WorkflowState.OTHER
    assert known == {state.name: state for state in WorkflowState if state is not WorkflowState.OTHER}


def test_a_state_of_a_later_server_counts_as_open() -> None:
    assert WorkflowState(99) is WorkflowState.OTHER
    assert [state.name for state in WorkflowState if state.is_open] == ["OTHER", "RUNNING", "PAUSED"]


async def test_a_workflow_that_no_worker_can_go_on_with_is_named() -> None:
    """A task that was tried twice may have lost its worker; one that is tried again and again fails."""
    service = SimpleNamespace()
    client = cast(Client, SimpleNamespace(namespace="n", workflow_service=service))
    for attempt, is_named in ((2, False), (9, True)):
        described = DescribeWorkflowExecutionResponse()
        described.workflow_execution_info.status = WorkflowState.RUNNING.value  # type: ignore[assignment]
        described.pending_workflow_task.attempt = attempt
        service.describe_workflow_execution = AsyncMock(return_value=described)
        pending = await pending_activities(client, "run/mine")
        assert pending is not None and bool(pending) == is_named
    assert "run/mine" in pending[0].error and pending[0].attempt == 9


@pytest.mark.parametrize(
    ("rpc", "status", "is_repeated"),
    [
        ("describe_schedule", RPCStatusCode.DEADLINE_EXCEEDED, True),
        ("list_workflow_executions", RPCStatusCode.DEADLINE_EXCEEDED, True),
        ("start_workflow_execution", RPCStatusCode.DEADLINE_EXCEEDED, False),
        ("query_workflow", RPCStatusCode.DEADLINE_EXCEEDED, False),
        ("describe_schedule", RPCStatusCode.NOT_FOUND, False),
    ],
)
async def test_a_read_that_a_busy_server_ended_is_made_again(
    rpc: str, status: RPCStatusCode, is_repeated: bool
) -> None:
    calls: list[str] = []

    async def answer(name: str, **_: Any) -> str:
        calls.append(name)
        if len(calls) == 1:
            raise RPCError("context deadline exceeded", status, b"")
        return "answer"

    service = SimpleNamespace(_rpc_call=answer)
    _wait_for_answers(cast(Client, SimpleNamespace(service_client=service)), Patience("Temporal"))
    if is_repeated:
        assert await service._rpc_call(rpc, timeout=None) == "answer"
    else:
        with pytest.raises(RPCError):
            await service._rpc_call(rpc, timeout=None)
    assert len(calls) == 1 + is_repeated
