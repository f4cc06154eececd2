"""`ratchet pause`: let a run start nothing new until it is resumed."""

from typing import Annotated

import typer


def pause(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Pause a run: no group, step or evaluation is started until `ratchet resume`.

    Rollouts in flight and the learner's step go on to their end. The command returns at once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).pause(reason).text)
