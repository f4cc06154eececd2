"""`ratchet admin prune` and `sweep`: delete what nothing needs any more, and end what has no owner."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any
from uuid import uuid4

import typer

from cli.console import print_json, say
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack


def prune(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Runs to prune now. Default: those whose `retention` is over.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also prune runs that could be resumed. They cannot be afterwards.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be pruned and change nothing.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Move turns and logs of ended runs to Parquet files, and delete their weights except the newest and the initial.

    The sweep does the same for runs that are done for long enough (`retention` in temporal.yaml).
    """
    from activities import pruning
    from client.session import run_blocking
    from ratchet.run_names import require_run_id

    async def run() -> list[pruning.Pruned]:
        async with Stack().database() as database:
            tasks = [pruning.PruneTask(require_run_id(name)) for name in runs or []]
            tasks = tasks or await pruning.due_tasks(database, load_temporal_settings().retention)
            work = pruning.describe_prune if dry_run else pruning.prune_run
            return [await work(database, task, force) for task in tasks]

    found = run_blocking(run())
    if json:
        print_json([asdict(one) for one in found])
        return
    verb = "would be" if dry_run else "were"
    for one in found:
        say(
            f"{one.run_id}: turns of {one.num_rollouts} rollouts {verb} archived, "
            f"{one.num_directories} directories of weights {verb} deleted"
        )
    if not found:
        say("nothing to prune: no run is done for as long as `retention` of temporal.yaml says")


def sweep(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be released and change nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Ignore the limit of boxes per pass.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Release boxes that have no owner and end rollouts whose workflow does not exist any more."""
    result = asyncio.run(_sweep(dry_run, force))
    if json:
        print_json(result)
    else:
        for line in result.pop("boxes"):
            say(f"{'would end ' if dry_run else ''}{line}")
        say(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()))


async def _sweep(dry_run: bool, force: bool) -> dict[str, Any]:
    from ratchet.sweep_payloads import SweepInput, SweepResult
    from stack.startup import connect_stack

    settings = load_temporal_settings()
    client = await connect_stack(Stack(), settings)
    result: SweepResult = await client.execute_workflow(
        "Sweep",
        SweepInput(dry_run=dry_run, force=force),
        id=settings.own(f"sweep/{uuid4().hex[:8]}"),
        task_queue=settings.own("control"),
        result_type=SweepResult,
    )
    return result.model_dump()
