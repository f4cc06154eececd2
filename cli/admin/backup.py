"""`ratchet admin backup` and `restore`: save the store with the weights and checkpoints that it refers to."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cli.console import say
from ratchet.errors import ConfigError
from stack.parts import Stack
from stack.postgres import embedded_server


def backup(directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")]) -> None:
    """Save the store, its checkpoints, weights and models into a directory, while runs go on.

    Temporal's histories are not included: `ratchet admin restore` starts the runs again from the store.
    """
    from client.session import run_blocking
    from stack.backup import Manifest, make_backup

    async def run() -> Manifest:
        stack = Stack()
        async with stack.database() as database:
            return await make_backup(database, stack.home, directory.absolute())

    made = run_blocking(run())
    say(f"{directory}: {len(made.runs)} runs, {len(made.files)} directories of weights and checkpoints")


def restore(
    directory: Annotated[Path, typer.Argument(help="A directory that `ratchet admin backup` has made.")],
    moved: Annotated[
        bool, typer.Option("--moved", help="The original is gone: keep its id, and end the boxes that it left.")
    ] = False,
) -> None:
    """Fill an empty state directory (RATCHET_HOME) or database (RATCHET_DATABASE_URL) from a backup.

    `ratchet up` then continues the runs from their newest checkpoints; rollouts that were in flight are replaced. The
    result is another installation than the original, whose boxes it leaves alone, unless `--moved` says otherwise.
    """
    from stack.backup import restore_backup
    from stack.supervisor import Supervisor

    stack = Stack()
    if Supervisor(stack).is_up():
        raise ConfigError(f"the stack in {stack.home} is up; stop it with `ratchet down`, or set RATCHET_HOME")
    stack.record_ports()
    is_external = stack.is_external("RATCHET_DATABASE_URL")
    server = nullcontext() if is_external else embedded_server(stack.home / "postgres", stack.ports["postgres"])
    with server:
        url = stack.environment()["RATCHET_DATABASE_URL"]
        made = asyncio.run(restore_backup(url, stack.home, directory.absolute(), moved))
    whose = "the same installation, whose boxes it ends" if moved else "a new installation, which ends no earlier boxes"
    say(f"{len(made.runs)} runs restored into {stack.home}, as {whose}; `ratchet up` continues them")
