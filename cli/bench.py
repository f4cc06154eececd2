"""`ratchet bench`: run a benchmark of the checkout and print its JSON."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    name: Annotated[str, typer.Argument(help="Name of a file in tests/benchmarks, without .py.")],
    more: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of the benchmark, after `--`: `-- --rollouts 10000`.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Run all repetitions; this can take hours.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Accepted for symmetry; stdout is always JSON.")] = True,
) -> None:
    """Run a benchmark. stdout carries only JSON; progress goes to stderr."""
    import runpy
    import sys

    from ratchet.errors import ConfigError

    directory = Path("tests/benchmarks")
    path = directory / f"{name}.py"
    if not path.is_file():
        known = (
            ", ".join(sorted(found.stem for found in directory.glob("[a-z]*.py")))
            or f"none ({directory} does not exist; run this in a checkout)"
        )
        raise ConfigError(f"no benchmark {name!r}; available: {known}")
    sys.argv = [str(path), *(["--full"] if full else []), *(more or [])]
    runpy.run_path(str(path), run_name="__main__")
