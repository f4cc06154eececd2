"""`ratchet show waiting`: list what open rollouts wait for, the longest wait first."""

from typing import Annotated

import typer

from ratchet.bounded_numbers import MAX_ROWS


def waiting(
    run_id: Annotated[
        str | None, typer.Argument(help="A run of `ratchet show runs`; by default the newest open one.", metavar="RUN")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rollouts.")] = 20,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List open rollouts by how long they have been in their stage: who waits for what, and since when.

    `ratchet show rollout ID` says what a rollout does now; `ratchet stop` and `ratchet retry` take an id or a group.
    """
    from dataclasses import asdict

    from cli.console import print_json, print_table
    from client import Client
    from ratchet.durations import duration_in_words
    from store import open_rollouts

    run = Client().run(run_id)
    found = Client().read(lambda connection: open_rollouts.list_slowest(connection, run.run_id, limit))
    if json:
        print_json([asdict(one) for one in found])
        return
    rows = [
        [str(one.rollout_id), one.group, str(one.member), duration_in_words(one.seconds), one.stage] for one in found
    ]
    print_table(f"open rollouts of {run.run_id}", ["id", "group", "member", "since", "stage"], rows)
