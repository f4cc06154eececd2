"""`ratchet models`: model directories, checkpoints, and the tiny policy."""

import typer

from cli.models.check import check
from cli.models.checkpoints import checkpoints_app
from cli.models.make import get, tiny_policy

models_app = typer.Typer(
    name="models", help="Check or get a model, make the tiny policy, list and export checkpoints.", no_args_is_help=True
)
models_app.command()(check)
models_app.command()(get)
models_app.command()(tiny_policy)
models_app.add_typer(checkpoints_app)
