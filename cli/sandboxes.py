"""`ratchet sandboxes`: the ledger of boxes beside what the provider really has; end one, or look into one."""

from typing import Annotated, Any

import typer

sandboxes_app = typer.Typer(
    name="sandboxes", help="Boxes: list them, end them, open a terminal in one.", invoke_without_command=True
)


@sandboxes_app.callback()
def list_command(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Released ones, too.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Boxes in the ledger, and whether their provider still has them."""
    if context.invoked_subcommand is not None:
        return
    from cli.console import print_json, print_table

    rows = _with_provider(_ledger(every))
    if json:
        print_json(rows)
        return
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
    print_table("boxes", columns, [[str(row[column]) for column in columns] for row in rows])


@sandboxes_app.command()
def kill(
    names: Annotated[list[str] | None, typer.Argument(help="Ids, of the ledger or of the provider.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that the ledger holds.")] = False,
) -> None:
    """End boxes. Rollouts that work in them boot new ones."""
    import asyncio

    from cli.console import say
    from ratchet.errors import ConfigError

    if bool(names) == every:
        raise ConfigError("give the ids of boxes (`ratchet sandboxes` shows them), or --all")
    rows = _ledger(every=False) if every else [_find(name) for name in names or []]
    asyncio.run(_kill(rows))
    say(f"{len(rows)} boxes ended")


@sandboxes_app.command()
def shell(
    name: Annotated[str, typer.Argument(help="Id, of the ledger or of the provider.")],
    user: Annotated[str, typer.Option(help="Who you are in the box.")] = "root",
) -> None:
    """A terminal in a live box. Ends with the shell; the box and its agent go on."""
    import asyncio

    from cli.box_terminal import run_docker_terminal, run_terminal
    from stack.parts import Stack

    row = _find(name)
    if row["provider"] == "docker":
        raise typer.Exit(run_docker_terminal(row["provider_id"], user))
    raise typer.Exit(asyncio.run(run_terminal(Stack().environment(), row["provider_id"], user)))


def _ledger(every: bool) -> list[dict[str, Any]]:
    from cli.store_access import query
    from ratchet.store import sandboxes

    return query(lambda connection: sandboxes.list_sandboxes(connection, every))


def _find(name: str) -> dict[str, Any]:
    from ratchet.errors import ConfigError

    for row in _ledger(every=False):
        if name in (str(row["id"]), row["provider_id"]):
            return row
    raise ConfigError(f"no box {name!r} is held; `ratchet sandboxes` shows them")


def _with_provider(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`at_provider`: running, paused or gone; `?` where the provider cannot be asked."""
    import asyncio

    from activities.boot import INSTALLATION_KEY
    from ratchet.errors import RatchetError

    ours = {INSTALLATION_KEY: str(_installation())}

    async def listed() -> dict[str, str]:
        provider = _provider()
        try:
            return {info.id: info.state for info in await provider.list(ours)}
        finally:
            await provider.close()

    try:
        states = asyncio.run(listed())
    except RatchetError:
        return [{**row, "at_provider": "?"} for row in rows]
    return [{**row, "at_provider": states.get(row["provider_id"], "gone")} for row in rows]


def _installation() -> Any:
    from cli.store_access import query
    from ratchet.store import sandboxes

    return query(sandboxes.installation_id)


def _provider() -> Any:
    import os

    from stack.parts import Stack
    from stack.worker import sandbox_provider

    os.environ.update(Stack().environment())
    return sandbox_provider()


async def _kill(rows: list[dict[str, Any]]) -> None:
    from ratchet.store import sandboxes
    from stack.parts import Stack

    provider = _provider()
    try:
        async with Stack().database() as database:
            for row in rows:
                async with database.begin() as connection:
                    await sandboxes.want_sandbox_release(connection, row["id"], "by hand")
                if row["provider_id"] is not None:
                    await provider.kill(row["provider_id"])
                async with database.begin() as connection:
                    await sandboxes.mark_released(connection, [row["id"]])
    finally:
        await provider.close()
