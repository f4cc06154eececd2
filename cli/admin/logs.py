"""`ratchet admin logs`: print a part's log."""

import contextlib
import subprocess
from typing import Annotated

import typer

from ratchet.bounded_numbers import MAX_ROWS
from ratchet.errors import ConfigError
from stack.part_logs import readable
from stack.parts import Stack


def logs(
    part: Annotated[
        str, typer.Argument(help="A part as in `ratchet status`, or supervisord; without one: a list.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option(min=0, max=MAX_ROWS, help="Number of lines to print.")] = 100,
) -> None:
    """Print the last lines of a part's log. Lines in JSON (RATCHET_LOG_FORMAT) are printed as text."""
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
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        assert tail.stdout is not None
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            for line in tail.stdout:
                print(readable(line.rstrip("\n")), flush=follow)
    if tail.returncode > 0:
        raise typer.Exit(1)
