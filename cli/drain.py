"""`ratchet drain`: end a run when what is in flight is settled."""

from typing import Annotated

import typer


def drain_command(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Start no new groups; the run ends when those in flight are trained, or will never be.

    Its last step may be smaller than the others. The run is then `stopped`, with a checkpoint; `ratchet resume` takes
    the wish back, also later. The command returns at once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).drain(reason).text)
