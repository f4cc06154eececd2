"""`ratchet bench`: runs a benchmark of the checkout and prints its JSON."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    name: Annotated[str, typer.Argument(help="A file of tests/benchmarks, without .py.")],
    full: Annotated[bool, typer.Option("--full", help="All repetitions, however long they take.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON is all it prints on stdout, with or without this.")] = True,
) -> None:
    """Run a benchmark; only JSON is printed on stdout, progress goes to stderr."""
    import runpy
    import sys

    from ratchet.errors import ConfigError

    directory = Path("tests/benchmarks")
    path = directory / f"{name}.py"
    if not path.is_file():
        known = (
            ", ".join(sorted(found.stem for found in directory.glob("[a-z]*.py")))
            or f"none: run it in a checkout, {directory} is not here"
        )
        raise ConfigError(f"no benchmark {name!r}; there are: {known}")
    sys.argv = [str(path), *(["--full"] if full else [])]
    runpy.run_path(str(path), run_name="__main__")
