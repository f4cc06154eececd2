"""`ratchet show mix` and `forks`: what a run was trained on, and why its conversations split into several chains."""

from dataclasses import asdict
from typing import Annotated

import typer

from cli.console import print_found, print_json, print_table, say
from ratchet.bounded_numbers import MAX_ROWS


def mix(
    run: Annotated[str | None, typer.Argument(help="The run; by default the newest.")] = None,
    last: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Print so many of the newest steps.")] = 5,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show groups and mean rewards of each step by dataset and by family of tasks; --json has all steps."""
    from client import Client

    found = Client().run(run)
    parts = found.mix()
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
    columns = ["step", "", "name", "trained groups", "rollouts with a verdict", "mean reward"]
    print_found(parts, json, found.run_id, columns, rows)


def forks(
    run: Annotated[str, typer.Argument(help="The run's id; see `ratchet show runs`.")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Report forks by cause, chains per rollout, context tokens per trained token, and alarms."""
    from sqlalchemy.ext.asyncio import AsyncConnection

    from client import Client
    from store import fork_report, retention

    async def read(connection: AsyncConnection) -> fork_report.ForkReport:
        await retention.require_turns(connection, run_id)
        return await fork_report.fork_report(connection, run_id)

    run_id = Client().run(run).run_id
    found = Client().read(read)
    if json:
        print_json(asdict(found))
        return
    share = max(found.num_turns, 1)
    rows = [[cause, str(number), f"{100 * number / share:.1f}%"] for cause, number in found.causes.items()]
    print_table(f"{found.num_turns} turns of {run_id}", ["fork cause", "turns", "share"], rows)
    facts = [
        ["rollouts ended", str(found.num_rollouts)],
        ["chains per rollout", f"{found.mean_chains:.2f}, at most {found.most_chains}"],
        ["trained tokens", str(found.num_trained_tokens)],
        ["context tokens per trained token", f"{found.context_per_trained_token:.1f}"],
        *([f"calls as text, no tokens: {cause}", str(number)] for cause, number in found.unread_calls.items()),
        *([kind, str(number)] for kind, number in found.kinds.items()),
    ]
    print_table("chains", ["what", "number"], facts)
    for alarm in found.alarms:
        say(f"ALARM: {alarm}")
