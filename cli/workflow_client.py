"""Start a workflow on a running stack and wait for its result, for commands that consist of one workflow."""

from typing import TypeVar

from pydantic import BaseModel

_T = TypeVar("_T", bound=BaseModel)


async def run_workflow(name: str, argument: BaseModel, workflow_id: str, result_type: type[_T]) -> _T:
    """Return the workflow's result. Raises ConfigError with the root cause of a failure, MachineError if Temporal does
    not answer.
    """
    from temporalio.client import WorkflowFailureError

    from cli.console import say
    from ratchet.errors import ConfigError
    from ratchet.temporal_client import root_cause
    from ratchet.temporal_settings import load_temporal_settings
    from stack.parts import Stack
    from stack.startup import connect_stack

    settings = load_temporal_settings()
    client = await connect_stack(Stack(), settings)
    workflow_id = settings.own(workflow_id)
    say(f"workflow {workflow_id}")
    try:
        result: _T = await client.execute_workflow(
            name, argument, id=workflow_id, task_queue=settings.own("control"), result_type=result_type
        )
    except WorkflowFailureError as error:
        raise ConfigError(f"{name} failed: {root_cause(error)}") from None
    return result
