"""`ratchet extend`: add steps to a run."""

from typing import Annotated

import typer

from ratchet.bounded_numbers import LARGEST_INTEGER


def extend(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    steps: Annotated[int, typer.Argument(help="Number of steps to add.", min=1, max=LARGEST_INTEGER)],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Add steps to a run; one that has ended goes on from its newest checkpoint. The command returns at once."""
    from cli.console import say
    from client import Client

    say(Client().run(run).extend(steps, reason).text)
