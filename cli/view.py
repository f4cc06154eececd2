"""`ratchet view` and `publish`: say where the viewer is, serve it if the stack does not, or write pages to a folder."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from cli.console import say
from ratchet.bounded_numbers import MAX_ROWS
from ratchet.errors import ConfigError, MachineError
from stack.parts import Stack

if TYPE_CHECKING:
    from viewer.settings import ViewerSettings


def view(
    target: Annotated[
        str | None, typer.Argument(help="A run, a step, a group, a rollout or a task.", metavar="[WHAT]")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write a rollout's pages to this directory instead; they need no server.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, by default RATCHET_VIEWER_HOST or loopback.")
    ] = None,
) -> None:
    """Print the viewer's address. If the stack's viewer does not run, serve it here until Ctrl-C."""
    import httpx

    from client import Client
    from ratchet.patience import ANSWER_SECONDS
    from store.names import Kind
    from viewer.app import ViewerServer
    from viewer.static_export import PageExporter

    stack = Stack()
    settings = viewer_settings(stack, host or stack.viewer_host)
    if export is not None:
        if target is None:
            raise ConfigError("name the rollout that is exported; `ratchet publish` exports runs")
        exporter = PageExporter(settings, export)
        asyncio.run(exporter.export_rollout(Client().find(target, Kind.ROLLOUT).id))
        say(f"{len(exporter.files)} pages written; open {export / 'index.html'}")
        return
    path = quote(Client().find(target, *Kind).page) if target else "/runs"
    print(settings.address + path + (f"?token={settings.token}" if settings.token else ""), flush=True)
    try:
        answer = httpx.get(settings.address + "/health", trust_env=False, timeout=ANSWER_SECONDS)
    except httpx.TransportError:
        say("the stack's viewer does not run; served here until Ctrl-C")
        ViewerServer(settings).run()
        return
    if not answer.is_success:
        raise MachineError(f"{settings.address} answers with {answer.status_code}; see `ratchet admin logs viewer`")


def viewer_settings(stack: Stack, host: str) -> "ViewerSettings":
    """Return the settings of the viewer of this stack. Outside of loopback, readers need the stack's token."""
    from viewer.settings import LOOPBACK_HOSTS, ViewerSettings

    environment = stack.environment()
    return ViewerSettings(
        database_url=environment["RATCHET_DATABASE_URL"],
        host=host,
        port=stack.ports["viewer"],
        token=None if host in LOOPBACK_HOSTS else stack.kept_secret("viewer.token"),
        temporal_ui=stack.shown_ui,
        temporal_namespace=environment["TEMPORAL_NAMESPACE"],
        trace_url=os.environ.get("RATCHET_TRACE_URL") or "",
        home=stack.home,
    )


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
