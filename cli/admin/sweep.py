"""`ratchet admin sweep`: run one pass of the sweep now."""

from typing import Annotated, Any

import typer


def sweep(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be released and change nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Ignore the limit of boxes per pass.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Release boxes that have no owner and end rollouts whose workflow does not exist any more."""
    import asyncio

    from cli.console import print_json, say

    result = asyncio.run(_sweep(dry_run, force))
    if json:
        print_json(result)
    else:
        for line in result.pop("boxes"):
            say(f"{'would end ' if dry_run else ''}{line}")
        say(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()))


async def _sweep(dry_run: bool, force: bool) -> dict[str, Any]:
    from uuid import uuid4

    from ratchet.sweep_payloads import SweepInput, SweepResult
    from ratchet.temporal_settings import load_temporal_settings
    from stack.parts import Stack
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
