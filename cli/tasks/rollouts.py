"""`ratchet tasks run` and `regrade`: run one rollout of a task, and grade stored patches again."""

import asyncio
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from cli.console import print_json, say
from cli.up import DEFAULT_CONFIG
from ratchet.config_sources import load_config
from ratchet.payloads import RolloutInput, RolloutResult
from stack.parts import Stack


def run(
    task: Annotated[str, typer.Argument(help="The row's label, or its number counted from 0.")],
    dataset: Annotated[Path | None, typer.Option(help="JSONL file; default: the config's first dataset.")] = None,
    config: Annotated[Path, typer.Option(help="Run config that gives model, harness and limits.")] = DEFAULT_CONFIG,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run one rollout and print its outcome; `ratchet show rollout` then prints its details."""
    from client.workflows import run_workflow
    from stack.startup import bring_up

    stack = Stack()
    resolved = load_config(config)
    bring_up(stack, resolved, say)
    path = str(dataset.resolve()) if dataset else resolved.datasets[0].path
    wanted = RolloutInput(dataset=path, task=task, config=resolved.model_dump(mode="json"))
    workflow_id = f"rollout/adhoc/{uuid4().hex[:12]}"
    result = asyncio.run(run_workflow(stack, "Rollout", wanted, workflow_id, RolloutResult, say))
    if json:
        print_json(result.model_dump())
    else:
        number = result.rollout_id
        say(f"rollout {number}: {result.outcome}, reward {result.reward}; `ratchet show rollout {number}`")


def regrade(
    what: Annotated[str, typer.Argument(help="A run, a group such as group/RUN/3, or a rollout.")],
    grader: Annotated[str | None, typer.Option(help="Grader to use instead of the task's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Number of grades per patch, each in a fresh box.")] = 1,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Update rewards to the new verdicts. Steps keep what they were trained with."),
    ] = False,
    window: Annotated[int, typer.Option(min=1, max=1000, help="Number of patches graded in parallel.")] = 2,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Grade stored patches again, for example after a grader was fixed. Needs a running stack (`ratchet up`)."""
    from client import Client

    result = Client().regrade(what, grader, repeats, adopt, window, say)
    if json:
        print_json(result.model_dump())
    else:
        say(
            f"{result.rollouts} rollouts graded again: {result.changed} verdicts changed, "
            f"{result.flaky} patches with differing verdicts, {result.adopted} rewards updated, "
            f"{result.without_verdict} without a verdict"
        )
