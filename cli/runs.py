"""`ratchet runs`: list the runs of this installation."""

from typing import Annotated

import typer


def runs(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List runs, newest first."""
    from cli.console import print_json, print_table
    from cli.store_access import query
    from ratchet.store import reports

    found = query(reports.list_runs)
    if json:
        print_json(found)
        return
    rows = [
        [
            run["run_id"],
            run["state"],
            f"{run['step']}/{run['steps']}",
            str(run["checkpoint_step"]),
            f"{run['graded']}/{run['rollouts']}",
        ]
        for run in found
    ]
    print_table("runs", ["run", "state", "step", "checkpoint", "graded rollouts"], rows)
    for run in found:
        if run["state_reason"]:
            print(f"{run['run_id']} is {run['state']}: {run['state_reason']}")
