"""`ratchet show groups`: list the groups of a run by what has become of them."""

from typing import Annotated

import typer

from cli.console import print_found
from cli.show.rollouts import NewestRun
from ratchet.bounded_numbers import MAX_ROWS


def groups(
    run_id: NewestRun = None,
    state: Annotated[
        str | None,
        typer.Option(help="open, ready, planned, trained, no_signal, expired, failed, discarded or cancelled."),
    ] = None,
    purpose: Annotated[str | None, typer.Option(help="train or eval.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of groups, newest first.")] = 50,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List a run's groups, newest first, with what each waits for or why it ended.

    The glossary (docs/reference/glossary.md, GroupProgress) says what the states mean.
    """
    from client import Client

    run = Client().run(run_id)
    found = run.groups(state, purpose, limit)
    rows = [
        [
            str(one["group_no"]),
            one["label"] or one["purpose"],
            one["state"].replace("_", " "),
            _rewards(one["lowest"], one["highest"]),
            one["task"],
            one["why"],
        ]
        for one in found
    ]
    columns = ["group", "for", "state", "rewards", "task", "why"]
    print_found(found, json, f"groups of {run.run_id}", columns, rows, breaks_last=True)


def _rewards(lowest: float | None, highest: float | None) -> str:
    if lowest is None or highest is None:
        return ""
    return f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
