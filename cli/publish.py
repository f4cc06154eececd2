"""`ratchet publish`: write runs to a folder that others can read and check."""

import asyncio
import shutil
from pathlib import Path
from typing import Annotated

import typer

from cli.console import say
from cli.view import viewer_settings
from ratchet.bounded_numbers import MAX_ROWS
from ratchet.errors import ConfigError


def publish(
    runs: Annotated[list[str], typer.Argument(help="The runs, for example one and its control.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="A new directory.")],
    max_rollouts: Annotated[
        int, typer.Option(min=0, max=MAX_ROWS, help="Newest rollouts of a run and purpose that have pages.")
    ] = 50,
) -> None:
    """Write the pages of ended runs, the tables that their results rest on, their configs, and verify.py, which
    recomputes the results from the tables."""
    from client import Client
    from reads.publication import write_publication
    from viewer.static_export import PageExporter

    if out.exists():
        raise ConfigError(f"{out} exists; name a new directory")
    client, partial = Client(), out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    run_ids = list(dict.fromkeys(client.run(one).run_id for one in runs))
    counts = client.read(lambda connection: write_publication(connection, run_ids, partial))
    settings = viewer_settings(client.stack, client.stack.viewer_host)
    for run_id in run_ids:
        asyncio.run(PageExporter(settings, partial / "pages" / run_id).export_run(run_id, max_rollouts))
    partial.rename(out)
    say(f"{sum(counts.values())} rows in {out / 'tables'}; check them with `python {out / 'verify.py'}`")
