"""`ratchet tasks regrade`: grade stored patches again, without a model call."""

from typing import Annotated

import typer


def regrade(
    what: Annotated[str, typer.Argument(help="A run, a group such as group/RUN/3, or a rollout.")],
    grader: Annotated[str | None, typer.Option(help="Grader to use instead of the task's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Number of grades per patch, each in a fresh box.")] = 1,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Update rewards to the new verdicts, except in groups that a step has used.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, max=1000, help="Number of patches graded in parallel.")] = 2,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Grade stored patches again, for example after a grader was fixed. Needs a running stack (`ratchet up`)."""
    from cli.console import print_json, say
    from client import Client

    result = Client().regrade(what, grader, repeats, adopt, window, say)
    if json:
        print_json(result.model_dump())
    else:
        say(
            f"{result.rollouts} rollouts graded again: {result.changed} verdicts changed, "
            f"{result.flaky} patches with differing verdicts, {result.adopted} rewards updated, "
            f"{result.without_verdict} without a verdict"
        )
