"""`ratchet skip-step`: discard a batch that cannot be trained."""

from typing import Annotated

import typer


def skip_step(
    run: Annotated[str, typer.Argument(help="A paused run of `ratchet runs`.", metavar="RUN")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")],
) -> None:
    """Discard the batch of a paused run's next step, for example one whose gradient is not finite.

    Its groups are never trained on. After `ratchet resume` the step is planned from other groups; the learner starts
    anew at its newest checkpoint for that, and trains the steps since then once more, with the same batches.
    """
    from cli.console import say
    from client import Client

    say(Client().run(run).skip_step(reason).text)
