"""`ratchet admin backup`: save the store with the weights and checkpoints that it refers to."""

from pathlib import Path
from typing import Annotated

import typer


def backup(directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")]) -> None:
    """Save the store, its checkpoints, weights and models into a directory, while runs go on.

    Temporal's histories are not included: `ratchet admin restore` starts the runs again from the store.
    """
    from cli.console import say
    from client.session import run_blocking
    from stack.backup import Manifest, make_backup
    from stack.parts import Stack

    async def run() -> Manifest:
        stack = Stack()
        async with stack.database() as database:
            return await make_backup(database, stack.home, directory.absolute())

    made = run_blocking(run())
    say(f"{directory}: {len(made.runs)} runs, {len(made.files)} directories of weights and checkpoints")
