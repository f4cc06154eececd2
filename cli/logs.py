"""`ratchet logs`: print a part's log."""

from typing import Annotated

import typer


def logs(
    part: Annotated[
        str, typer.Argument(help="postgres, temporal, gateway, ray, engine, adapter, learner, worker or supervisord.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option(help="Number of lines to print.")] = 100,
) -> None:
    """Print the last lines of a part's log."""
    import os

    from ratchet.errors import ConfigError
    from stack.parts import Stack

    directory = Stack().home / "logs"
    path = directory / f"{part}.log"
    if not path.is_file():
        known = (
            ", ".join(sorted(log.stem for log in directory.glob("*.log")))
            or "none yet: start the stack with `ratchet up`"
        )
        raise ConfigError(f"no log of {part!r}; available: {known}")
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), str(path)])
