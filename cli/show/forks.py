"""`ratchet show forks`: report why a run's conversations split into several chains."""

from typing import Annotated

import typer


def forks(
    run: Annotated[str, typer.Argument(help="The run's id; see `ratchet show runs`.")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Report forks by cause, chains per rollout, context tokens per trained token, and alarms."""
    from dataclasses import asdict

    from sqlalchemy.ext.asyncio import AsyncConnection

    from cli.console import print_json, print_table, say
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
        *([f"calls as text: {cause}", str(number)] for cause, number in found.unread_calls.items()),
        *([kind, str(number)] for kind, number in found.kinds.items()),
    ]
    print_table("chains", ["what", "number"], facts)
    for alarm in found.alarms:
        say(f"ALARM: {alarm}")
