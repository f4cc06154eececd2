"""`ratchet retry`: run again what ended without a verdict, or try a pending stage now."""

from typing import Annotated

import typer


def retry(
    what: Annotated[
        str,
        typer.Argument(help="A rollout's number, or a workflow: group/RUN/3, rollout/RUN/3/0, evaluate/RUN/start-t1."),
    ],
    stage: Annotated[
        str | None, typer.Option(help="Try this pending stage of the rollout now, such as boot or grade.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Run a rollout, or the members of a group, again that ended without a verdict, beyond the run's replacements.

    What has a verdict is judged again by `ratchet regrade`. A group that is cancelled, or that a step has used, is not
    run again: the run makes other ones by itself. A rollout of an evaluation is retried with its evaluation, which runs
    all again that has no verdict, as long as its run is at the same step; a run that has ended is open meanwhile, and
    trains no further step. A rollout by hand is made anew by `ratchet rollout`.

    What cannot be retried is refused with the reason and exit code 2.
    """
    from cli.console import say
    from client import Client

    say(Client().retry(what, stage, reason).text)
