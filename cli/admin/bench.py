"""`ratchet admin bench`: run a benchmark of the checkout and print its JSON."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from ratchet.errors import ConfigError


def bench(
    name: Annotated[str, typer.Argument(help="A benchmark; without one, they are listed.", metavar="[NAME]")] = "",
    more: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of the benchmark, after `--`: `-- --rollouts 10000`.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Run all repetitions; this can take hours.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Accepted for symmetry; stdout is always JSON.")] = True,
) -> None:
    """Run a benchmark. stdout carries only JSON; progress goes to stderr."""
    directory = Path("tests/benchmarks")
    known = sorted(found.stem for found in directory.glob("[a-z]*.py"))
    if not known:
        raise ConfigError(f"{directory} does not exist: benchmarks run in a checkout of the repository")
    if not name:
        for one in known:
            about = ast.get_docstring(ast.parse((directory / f"{one}.py").read_text())) or ""
            print(f"{one:<16} {about.splitlines()[0]}")
        return
    path = directory / f"{name}.py"
    if name not in known:
        raise ConfigError(f"no benchmark {name!r}; available: {', '.join(known)}")
    sys.argv = [str(path), *(["--full"] if full else []), *(more or [])]
    runpy.run_path(str(path), run_name="__main__")
