"""`ratchet rollout`: run one rollout of one task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.up import DEFAULT_CONFIG

if TYPE_CHECKING:
    from stack.parts import Stack


def rollout(
    task: Annotated[str, typer.Argument(help="The row's label, or its number counted from 0.")],
    dataset: Annotated[Path | None, typer.Option(help="JSONL file; default: the config's first dataset.")] = None,
    config: Annotated[Path, typer.Option(help="Run config that gives model, harness and limits.")] = DEFAULT_CONFIG,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run one rollout and print its outcome; `ratchet show` then prints its details."""
    import asyncio

    from cli.console import print_json, say
    from ratchet.config_sources import load_config
    from stack.parts import Stack
    from stack.startup import bring_up

    stack = Stack()
    resolved = load_config(config)
    bring_up(stack, resolved, say)
    path = str(dataset.resolve()) if dataset else resolved.datasets[0].path
    result = asyncio.run(_run(stack, resolved.model_dump(mode="json"), path, task))
    if json:
        print_json(result)
    else:
        say(
            f"rollout {result['rollout_id']}: {result['outcome']}, reward {result['reward']}; "
            f"`ratchet show {result['rollout_id']}`"
        )


async def _run(stack: "Stack", config: dict[str, Any], path: str, task: str) -> dict[str, Any]:
    from uuid import uuid4

    from temporalio.client import WorkflowFailureError

    from cli.console import say
    from ratchet.errors import ConfigError
    from ratchet.payloads import RolloutInput, RolloutResult
    from ratchet.temporal_client import root_cause
    from ratchet.temporal_settings import load_temporal_settings
    from stack.startup import connect_running

    settings = load_temporal_settings()
    client = await connect_running(stack, settings)
    rollout = RolloutInput(dataset=path, task=task, config=config)
    workflow_id = settings.own(f"rollout/adhoc/{uuid4().hex[:12]}")
    say(f"started {workflow_id}; the Temporal UI shows its stages")
    try:
        result: RolloutResult = await client.execute_workflow(
            "Rollout", rollout, id=workflow_id, task_queue=settings.own("control"), result_type=RolloutResult
        )
    except WorkflowFailureError as error:
        raise ConfigError(f"the rollout failed: {root_cause(error)}") from None
    return result.model_dump()
