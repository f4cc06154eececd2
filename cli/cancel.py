"""`ratchet cancel`: cancel one group or one rollout."""

from typing import Annotated

import typer


def cancel(
    what: Annotated[str, typer.Argument(help="A rollout's number, or a workflow: group/RUN/3, rollout/RUN/3/0.")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Cancel a group or a rollout. Its boxes are released; the run makes another one.

    To end a run use `ratchet stop` or `ratchet drain`.
    """
    from cli.console import say
    from client import Client

    say(Client().cancel(what, reason).text)
