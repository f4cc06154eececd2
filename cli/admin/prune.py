"""`ratchet admin prune`: archive the turns of ended runs and delete weights that nothing needs."""

from typing import Annotated

import typer


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
    from dataclasses import asdict

    from activities import pruning
    from cli.console import print_json, say
    from client.session import run_blocking
    from ratchet.run_names import require_run_id
    from ratchet.temporal_settings import load_temporal_settings
    from stack.parts import Stack

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
