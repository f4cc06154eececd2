"""`ratchet show rollout`: lists of runs, groups and rollouts, and one rollout in full."""

import typer

from cli.show.groups import groups
from cli.show.rollout import rollout
from cli.show.rollouts import rollouts, waiting
from cli.show.runs import requests, runs
from cli.show.training import forks, mix

show_app = typer.Typer(
    name="show", help="List runs, groups and rollouts, or show one rollout in full.", no_args_is_help=True
)
for command in (runs, groups, rollouts, rollout, waiting, mix, forks, requests):
    show_app.command()(command)
