"""`ratchet show rollout`: lists of runs, groups and rollouts, and one rollout in full."""

import typer

from cli.show import forks, groups, mix, requests, rollout, rollouts, runs, waiting

show_app = typer.Typer(
    name="show", help="List runs, groups and rollouts, or show one rollout in full.", no_args_is_help=True
)
for command in (
    runs.runs,
    groups.groups,
    rollouts.rollouts,
    rollout.rollout,
    waiting.waiting,
    mix.mix,
    forks.forks,
    requests.requests,
):
    show_app.command()(command)
