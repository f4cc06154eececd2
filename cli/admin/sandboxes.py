"""`ratchet admin sandboxes`: compare boxes of ledger and provider, end them, open a terminal in one, try a service."""

import asyncio
import os
from typing import Annotated, Any

import typer

from cli.console import print_found, say
from ratchet.errors import ConfigError, RatchetError
from stack.parts import Stack

_TTL_SECONDS = 4 * 3600
"""Time to live that `check` asks for: that of a box whose agent may work for an hour."""

sandboxes_app = typer.Typer(
    name="sandboxes", help="List boxes, end them, open a terminal in one, try a service.", invoke_without_command=True
)


@sandboxes_app.callback()
def list_command(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Include released boxes.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List the boxes of the ledger and whether their provider still runs them."""
    if context.invoked_subcommand is not None:
        return
    rows = _with_provider(_ledger(every))
    columns = [
        "id",
        "provider_id",
        "role",
        "state",
        "rollout_id",
        "attempt",
        "age_seconds",
        "at_provider",
        "release_reason",
    ]
    print_found(rows, json, "boxes", columns, [[str(row[column]) for column in columns] for row in rows])


@sandboxes_app.command()
def kill(
    names: Annotated[list[str] | None, typer.Argument(help="Ids, from the ledger or from the provider.")] = None,
    every: Annotated[bool, typer.Option("--all", help="End every box of the ledger.")] = False,
) -> None:
    """End boxes. Rollouts that use them boot new ones."""
    from client.session import run_blocking

    if bool(names) == every:
        raise ConfigError("give the ids of boxes (`ratchet admin sandboxes` shows them), or --all")
    rows = _ledger(every=False) if every else [_find(name) for name in names or []]
    num_released = run_blocking(_kill(rows))
    say(f"{num_released} boxes ended")
    if num_released < len(rows):
        say(f"{len(rows) - num_released} could not be ended yet, as logged above; the sweep tries again")


@sandboxes_app.command()
def check(
    url: Annotated[
        str | None, typer.Argument(help="Address of a service with E2B's API; default: the service of this stack.")
    ] = None,
    image: Annotated[str, typer.Option(help="Image of the boxes in which it is tried.")] = "base",
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Try a sandbox service: what a run needs of it, and the rest of the contract, each with the time it took.

    The key is that of E2B_API_KEY. The way to the adapter is tried if ADAPTER_PUBLIC_HOST names it, or if the stack
    is up. Exit code 1 if something is missing.
    """
    from activities.sandbox_probe import Finding, SandboxProbe
    from sandboxes.registry import adapter_url
    from stack.supervisor import Supervisor

    is_adapter_known = bool(os.environ.get("ADAPTER_PUBLIC_HOST")) or Supervisor(Stack()).is_up()
    if url is not None:
        os.environ |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url}
    provider = _provider()
    ttl_seconds = min(_TTL_SECONDS, provider.capabilities.max_ttl_seconds)

    async def tried() -> list[Finding]:
        probe = SandboxProbe(provider, adapter_url() if is_adapter_known else "")
        try:
            return [found async for found in probe.findings(image, ttl_seconds, 0, more=True)]
        finally:
            await provider.close()

    findings = asyncio.run(tried())
    rows = [{"capability": one.capability, "measured": one.measured, "missing": one.problem} for one in findings]
    cells = [["NO" if row["missing"] else "ok", *row.values()] for row in rows]
    print_found(rows, json, "sandbox service", ["", *rows[0]], cells, breaks_last=True)
    if any(row["missing"] for row in rows):
        raise typer.Exit(1)


@sandboxes_app.command()
def shell(
    name: Annotated[str, typer.Argument(help="Id, from the ledger or from the provider.")],
    user: Annotated[str, typer.Option(help="User in the box.")] = "root",
) -> None:
    """Open a terminal in a live box. Closing the shell leaves the box and its agent running."""
    from cli.admin.box_terminal import run_docker_terminal, run_terminal

    row = _find(name)
    if row["provider"] == "docker":
        raise typer.Exit(run_docker_terminal(row["provider_id"], user))
    raise typer.Exit(asyncio.run(run_terminal(Stack().environment(), row["provider_id"], user)))


def _ledger(every: bool) -> list[dict[str, Any]]:
    from client import Client
    from store import sandboxes

    return Client().read(lambda connection: sandboxes.list_sandboxes(connection, every))


def _find(name: str) -> dict[str, Any]:
    for row in _ledger(every=False):
        if name in (str(row["id"]), row["provider_id"]):
            return row
    raise ConfigError(f"no live box {name!r}; `ratchet admin sandboxes` lists the live ones")


def _with_provider(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `at_provider` to each row: running, paused or not listed; `?` if the provider cannot be reached."""
    from activities.box_lifecycle import INSTALLATION_KEY
    from client import Client
    from store import installations

    installation = Client().read(installations.installation)

    async def listed() -> dict[str, str]:
        provider, ids = _provider(), (*installation.own_ids, *installation.copied_from)
        try:
            return {info.id: info.state for one in ids for info in await provider.list({INSTALLATION_KEY: one})}
        finally:
            await provider.close()

    try:
        states = asyncio.run(listed())
    except RatchetError:
        return [{**row, "at_provider": "?"} for row in rows]
    return [{**row, "at_provider": states.get(row["provider_id"], "not listed")} for row in rows]


def _provider() -> Any:
    from sandboxes.registry import sandbox_provider

    os.environ.update(Stack().environment())
    return sandbox_provider()


async def _kill(rows: list[dict[str, Any]]) -> int:
    """End the boxes of these rows and return how many rows are released."""
    from activities.box_lifecycle import release_box
    from store import sandboxes

    provider = _provider()
    try:
        async with Stack().database() as database:
            num_released = 0
            for row in rows:
                await database.run(sandboxes.want_sandbox_release, row["id"], "by hand")
                num_released += await release_box(database, provider, row["id"], row["provider_id"], waits=True)
            return num_released
    finally:
        await provider.close()
