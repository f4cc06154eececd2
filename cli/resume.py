"""`ratchet resume`: let a run that has stopped before its last step go on."""

from typing import Annotated

import typer


def resume(run_id: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")]) -> None:
    """Let a paused, failed or cancelled run go on from its newest checkpoint.

    Mend first what stopped it: `ratchet runs` shows the reason. The command returns at once.
    """
    import asyncio

    from cli.console import say
    from stack.follow_run import restart_run
    from stack.parts import Stack

    reason = asyncio.run(restart_run(Stack(), run_id))
    say(f"run {run_id} goes on" if reason else f"run {run_id} was running already")
    if reason:
        say(f"it had stopped: {reason}")
