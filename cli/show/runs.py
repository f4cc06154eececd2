"""`ratchet show runs` and `requests`: list the runs of this installation, and what people have asked of one."""

from typing import Annotated, Any

import typer

from cli.console import answered_by, print_found, print_json, print_table
from ratchet.config_engines import DEFAULT_SET


def runs(
    run_id: Annotated[str | None, typer.Argument(help="Only this run.", metavar="[RUN]")] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List runs, newest first."""
    from client import Client

    only = Client().run(run_id).run_id if run_id else None
    found = [run for run in Client().runs() if only in (None, run["run_id"])]
    if json:
        print_json(found)
        return
    has_sets = any(run["engine_set"] != DEFAULT_SET for run in found)
    rows = [
        [
            run["run_id"],
            _state(run),
            "by hand" if run["is_by_hand"] else f"{run['step']}/{run['num_steps']}",
            "" if run["is_by_hand"] else str(run["checkpoint_step"]),
            "" if run["best_step"] is None else f"{run['best_step']} ({run['best_rate']:.3f})",
            f"{run['num_graded']}/{run['num_rollouts']}",
            *([run["engine_set"]] if has_sets else []),
        ]
        for run in found
    ]
    columns = ["run", "state", "step", "saved", "best step", "graded rollouts"]
    print_table("runs", [*columns, *(["engine set"] if has_sets else [])], rows)
    for run in found:
        if run["reason"]:
            print(f"{run['run_id']} is {run['state']}: {run['reason']}")
        if run["endpoint"] is not None:
            print(f"{run['run_id']} is {answered_by(run['endpoint'])}")
        if run["wish"] != "none":
            end = "when what is in flight is settled" if run["stop_at"] is None else f"after step {run['stop_at']}"
            print(f"{run['run_id']} is asked to {run['wish']}: it ends {end}; `ratchet show requests {run['run_id']}`")


def _state(run: dict[str, Any]) -> str:
    if run["is_by_hand"] and run["state"] == "running":
        return "open"  # it takes rollouts for ever, and runs none by itself
    return run["state"] if run["wish"] == "none" else f"{run['state']}, {run['wish']}"


def requests(
    run: Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what people have asked of a run, newest first: who, when, from what to what, from which planned step on."""
    from client import Client

    found = Client().run(run).steering()
    rows = [
        [f"{one['asked_at']:%Y-%m-%d %H:%M:%S}", one["asked_by"], str(one["from_step"]), one["what"], one["reason"]]
        for one in found
    ]
    columns = ["asked at", "by", "first step planned after it", "what", "why"]
    print_found(found, json, f"{len(rows) or 'no'} requests to {run}", columns, rows, breaks_last=True)
