"""`ratchet up`: start the local stack and wait until it is ready."""

from pathlib import Path
from typing import Annotated

import typer

from cli.console import say
from ratchet.config_sources import load_config
from stack.parts import Stack

DEFAULT_CONFIG = Path("configs/quickstart.yaml")


def up(
    config: Annotated[Path, typer.Argument(help="Run config that names the model to serve.")] = DEFAULT_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    moved: Annotated[
        bool | None,
        typer.Option(
            "--moved/--copied",
            help="The store was moved or restored and its original is gone; or it is a copy, and the original lives "
            "on. Needed if `ratchet up` asks.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start the local stack, or bring a running one up to date. Returns when every part answers."""
    from stack.startup import bring_up

    stack = Stack()
    bring_up(stack, load_config(config, set or []), say, moved=moved)
    say("ready; `ratchet status` shows the parts, `ratchet down` stops them")
