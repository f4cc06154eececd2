"""`ratchet stop`: end a run after the step that is planned."""

from typing import Annotated

import typer


def stop(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    now: Annotated[bool, typer.Option("--now", help="End an evaluation in progress, too.")] = False,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """End a run after the step that is planned, with a checkpoint; rollouts in flight are cancelled.

    An evaluation that runs ends first, unless --now ends it with the verdicts that it has (`ratchet retry
    evaluate/RUN/LABEL` runs the rest later). A paused run ends after its newest trained step; stop it again if it was
    paused after the first request. The run is then `stopped`; `ratchet resume` lets it go on. The command returns at
    once.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).stop(reason, now).text)
