"""`ratchet rollouts`: list the rollouts of a run."""

from typing import Annotated

import typer

from ratchet.types import JsonObject


def rollouts(
    run: Annotated[str, typer.Option("--run", help="The run's id.")],
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Only solved rollouts whose patch or test run is flagged.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of rollouts, newest first.")] = 50,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List a run's rollouts with outcome and reward."""
    from cli.console import print_json, print_table
    from cli.store_access import query
    from ratchet.errors import ConfigError
    from ratchet.store import reports, runs

    if query(lambda connection: runs.get_run(connection, run)) is None:
        raise ConfigError(f"run {run} does not exist; `ratchet runs` lists those that do")
    found = query(lambda connection: reports.list_rollouts(connection, run, limit, flagged))
    if json:
        print_json(found)
        return
    rows = [
        [
            str(row["id"]),
            row["purpose"],
            row["task"],
            row["outcome"] or "open",
            "" if row["reward"] is None else f"{row['reward']:g}",
            row["agent_exit"] or "",
            str(row["num_turns"]),
            _one_line(_flags_of(row) or row["outcome_reason"]),
        ]
        for row in found
    ]
    print_table(f"rollouts of {run}", ["id", "purpose", "task", "outcome", "reward", "exit", "turns", "reason"], rows)


def _flags_of(row: JsonObject) -> str:
    return "; ".join(f"{flag['what']} ({flag['place']})" for flag in row["flags"] or [])


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
