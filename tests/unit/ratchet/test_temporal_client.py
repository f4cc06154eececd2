"""The executions of a workflow that count as open."""

from temporalio.api.enums.v1 import WorkflowExecutionStatus

from ratchet.temporal_client import WorkflowState


def test_every_state_that_temporal_knows_has_its_own_value_here() -> None:
    known = {name.removeprefix("WORKFLOW_EXECUTION_STATUS_"): value for name, value in WorkflowExecutionStatus.items()}
    assert known.pop("UNSPECIFIED") == WorkflowState.OTHER
    assert known == {state.name: state for state in WorkflowState if state is not WorkflowState.OTHER}


def test_a_state_of_a_later_server_counts_as_open() -> None:
    assert WorkflowState(99) is WorkflowState.OTHER
    assert [state.name for state in WorkflowState if state.is_open] == ["OTHER", "RUNNING", "PAUSED"]
