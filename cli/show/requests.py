"""`ratchet show requests`: list what people have asked of a run."""

from typing import Annotated

import typer

from cli.console import print_found


def requests(
    run: Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what people have asked of a run, newest first: who, when, from what to what, and the first step planned
    after it.
    """
    from client import Client

    found = Client().run(run).steering()
    rows = [
        [f"{one['asked_at']:%Y-%m-%d %H:%M:%S}", one["asked_by"], str(one["from_step"]), one["what"], one["reason"]]
        for one in found
    ]
    columns = ["asked at", "by", "first step planned after it", "what", "why"]
    print_found(found, json, f"{len(rows) or 'no'} requests to {run}", columns, rows, breaks_last=True)
