"""`ratchet resume`: let a run go on."""

from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Let a paused, stopped, failed or cancelled run go on from its newest checkpoint.

    Mend first what stopped it: `ratchet runs` shows the reason. A run that is to drain or to stop goes on, too. The
    command returns at once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).resume(reason).text)
