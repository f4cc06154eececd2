"""`ratchet set`: change values of a run's config while it goes on."""

from typing import Annotated

import typer


def set(
    run: Annotated[str, typer.Argument(help="A run of `ratchet runs`.", metavar="RUN")],
    changes: Annotated[list[str], typer.Argument(help="KEY=VALUE, as in the config.", metavar="KEY=VALUE")],
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")] = "",
) -> None:
    """Change config values of a run, all or none, from the next decision on: staleness, boxes, groups a step, learning
    rate, temperature, evaluations.

    A step is trained with the values of its plan row, so a replay trains the same. A key that may not change is
    refused with the reason; `ratchet steering RUN` lists what was changed.
    """
    from cli.console import say
    from client import Client
    from ratchet.config_sources import dotted_values

    say(Client().run(run).set(dotted_values(changes), reason).text)
