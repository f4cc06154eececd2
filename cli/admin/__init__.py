"""`ratchet admin`: the boxes, logs, store and programs of this machine."""

import typer

from cli.admin.agents import agents_app
from cli.admin.backup import backup, restore
from cli.admin.bench import bench
from cli.admin.cleaning import prune, sweep
from cli.admin.config import config, env
from cli.admin.export import export
from cli.admin.logs import logs
from cli.admin.sandboxes import sandboxes_app
from cli.admin.servers import codec_server
from cli.admin.setup import setup

admin_app = typer.Typer(
    name="admin", help="Logs, sandboxes, backups, exports and programs of this machine.", no_args_is_help=True
)
for command in (logs, env, config, setup, sweep, backup, restore, prune, export, codec_server, bench):
    admin_app.command()(command)
for group in (sandboxes_app, agents_app):
    admin_app.add_typer(group)
