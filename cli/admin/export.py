"""`ratchet admin export`: write a run's samples to files."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.console import print_json, say


class Format(StrEnum):
    JSONL = "jsonl"
    PT = "pt"


def export(
    run: Annotated[str, typer.Argument(help="The run's id; see `ratchet show runs`.")],
    format: Annotated[
        list[Format] | None,
        typer.Option("--format", help="Output format. Repeat the option for several; default: all."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory. Default: runs/<config>_<time of start>.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Write every chain of a run with its tokens, masks, logprobs and rewards."""
    from client import Client
    from training.sample_export import export_run

    run_id, formats = Client().run(run).run_id, [one.value for one in format or Format]
    written = Client().read(lambda connection: export_run(connection, run_id, formats, out))
    if json:
        print_json({str(path): number for path, number in written.items()})
        return
    for path, number in written.items():
        say(f"{path}: {number} samples")
