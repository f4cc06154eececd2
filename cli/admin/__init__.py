"""`ratchet admin`: the boxes, logs, store and programs of this machine."""

import typer

from cli.admin import (
    agents,
    backup,
    bench,
    codec_server,
    config,
    env,
    export,
    logs,
    mcp,
    prune,
    restore,
    sandboxes,
    setup,
    sweep,
)

admin_app = typer.Typer(
    name="admin", help="Logs, sandboxes, backups, exports and programs of this machine.", no_args_is_help=True
)
for command in (
    logs.logs,
    env.env,
    config.config,
    setup.setup,
    sweep.sweep,
    backup.backup,
    restore.restore,
    prune.prune,
    export.export,
    mcp.mcp,
    codec_server.codec_server,
    bench.bench,
):
    admin_app.command()(command)
for group in (sandboxes.sandboxes_app, agents.agents_app):
    admin_app.add_typer(group)
