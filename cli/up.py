"""`ratchet up`: the local stack, started and made ready."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_CONFIG = Path("configs/quickstart.yaml")


def up(
    config: Annotated[Path, typer.Argument(help="Whose model the engine serves.")] = DEFAULT_CONFIG,
    set: Annotated[list[str], typer.Option("--set", help="KEY=VALUE, over the file.")] = [],  # noqa: B006
) -> None:
    """Start the local stack, or bring a running one up to date; returns when everything answers."""
    from cli.console import say
    from ratchet.config_sources import load_config
    from stack.parts import Stack
    from stack.startup import bring_up

    stack = Stack()
    bring_up(stack, load_config(config, set), say)
    say(f"ready; Temporal UI {stack.temporal_ui}; `ratchet status` tells more, `ratchet down` ends it")
