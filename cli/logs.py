"""`ratchet logs`: print a part's log."""

from typing import Annotated

import typer


def logs(
    part: Annotated[
        str, typer.Argument(help="A part as in `ratchet status`, or supervisord; without one: a list.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option(help="Number of lines to print.")] = 100,
) -> None:
    """Print the last lines of a part's log."""
    import os

    from ratchet.errors import ConfigError
    from stack.parts import Stack

    directory = Stack().home / "logs"
    known = sorted(log.stem for log in directory.glob("*.log"))
    if not part:
        print("\n".join(known) or "no logs yet: start the stack with `ratchet up`")
        return
    path = directory / f"{part}.log"
    if not path.is_file():
        raise ConfigError(
            f"no log of {part!r}; available: {', '.join(known) or 'none yet: start the stack with `ratchet up`'}"
        )
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), str(path)])
