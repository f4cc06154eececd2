"""`ratchet pause`: let a run start nothing new until it is resumed."""

from typing import Annotated

import typer


def pause(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Pause a run: no group, step or evaluation is started until `ratchet resume`.

    Rollouts in flight, the learner's step and an evaluation that has begun, with all its rollouts, go on to their end;
    `ratchet cancel evaluate/RUN/LABEL` ends that with the verdicts that it has. The command returns at once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).pause(reason).text)
