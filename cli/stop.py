"""`ratchet stop`: end a run after the step that is planned."""

from typing import Annotated

import typer


def stop(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """End a run after the step that is planned, with a checkpoint; rollouts in flight are cancelled.

    A paused run ends at once. The run is then `stopped`; `ratchet resume` lets it go on. The command returns at once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).stop(reason).text)
