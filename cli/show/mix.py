"""`ratchet show mix`: what each step of a run was trained on, by dataset and by family."""

from typing import Annotated

import typer

from ratchet.bounded_numbers import MAX_ROWS


def mix(
    run: Annotated[str | None, typer.Argument(help="The run; by default the newest.")] = None,
    last: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Print so many of the newest steps.")] = 5,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show groups and mean rewards of each step by dataset and by family of tasks; --json has all steps."""
    from cli.console import print_json, print_table
    from client import Client

    found = Client().run(run)
    parts = found.mix()
    if json:
        print_json(parts)
        return
    steps = sorted({one["step"] for one in parts})[-last:]
    rows = [
        [
            str(one["step"]),
            one["kind"],
            one["name"],
            f"{one['num_trained']}/{one['num_groups']}",
            str(one["num_rollouts"]),
            "" if one["reward_mean"] is None else f"{one['reward_mean']:.3f}",
        ]
        for one in parts
        if one["step"] in steps
    ]
    print_table(found.run_id, ["step", "", "name", "trained groups", "rollouts with a verdict", "mean reward"], rows)
