"""`ratchet steering`: list what people have asked of a run."""

from typing import Annotated

import typer


def steering(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what people have asked of a run: who, when, from what to what, and the first step planned after it."""
    from cli.console import print_json, print_table
    from client import Client

    found = Client().run(run).steering()
    if json:
        print_json(found)
        return
    columns = ["when", "who", "what", "from", "to", "from step", "why"]
    rows = [
        [
            f"{row['asked_at']:%Y-%m-%d %H:%M:%S}",
            row["asked_by"],
            f"{row['action']} {row['target']}".strip(),
            str(row["before"]),
            str(row["after"]),
            str(row["from_step"]),
            row["reason"],
        ]
        for row in found
    ]
    print_table(f"requests to {run}", columns, rows)
