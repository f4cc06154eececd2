"""`ratchet cancel`: cancel one group, one rollout or one evaluation."""

from typing import Annotated

import typer


def cancel(
    what: Annotated[
        str,
        typer.Argument(help="A rollout's number, or a workflow: group/RUN/3, rollout/RUN/3/0, evaluate/RUN/start-t1."),
    ],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Cancel a group, a rollout or an evaluation, and release its boxes.

    The run makes another group or rollout. An evaluation ends with the verdicts that it has, and the run goes on.
    To end a run use `ratchet stop` or `ratchet drain`.
    """
    from cli.console import say
    from client import Client

    say(Client().cancel(what, reason).text)
