"""`ratchet admin bench`: run a benchmark of the checkout and print its JSON."""

from pathlib import Path
from typing import Annotated

import typer

_NEEDS_GPU = ("gpu", "gpu_loop")
_RESULTS = Path("docs/bench")


def bench(
    name: Annotated[str, typer.Argument(help="A benchmark; without one, they are listed.", metavar="[NAME]")] = "",
    more: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of the benchmark, after `--`: `-- --rollouts 10000`.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Run all repetitions; this can take hours.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Accepted for symmetry; stdout is always JSON.")] = True,
    every: Annotated[
        bool,
        typer.Option("--all", help="Run all that need no GPU, and write docs/bench/NAME.json each; this takes hours."),
    ] = False,
) -> None:
    """Run a benchmark. stdout carries only JSON; progress goes to stderr."""
    import runpy
    import sys

    from ratchet.errors import ConfigError

    directory = Path("tests/benchmarks")
    known = sorted(found.stem for found in directory.glob("[a-z]*.py"))
    if not known:
        raise ConfigError(f"{directory} does not exist: benchmarks run in a checkout of the repository")
    if every:
        if name or more:
            raise ConfigError(f"--all runs every benchmark; leave {' '.join([name, *(more or [])]).strip()!r} out")
        failed = [one for one in known if one not in _NEEDS_GPU and not _ran(one, full)]
        if failed:
            print(f"these benchmarks failed and keep their earlier files: {', '.join(failed)}", file=sys.stderr)
            raise typer.Exit(1)
        return
    if not name:
        for one in known:
            print(f"{one:<16} {_first_sentence(directory / f'{one}.py')}")
        return
    path = directory / f"{name}.py"
    if name not in known:
        raise ConfigError(f"no benchmark {name!r}; available: {', '.join(known)}")
    sys.argv = [str(path), *(["--full"] if full else []), *(more or [])]
    runpy.run_path(str(path), run_name="__main__")


def _ran(name: str, full: bool) -> bool:
    """Run a benchmark, and replace its file of results if it succeeds."""
    import subprocess
    import sys
    import time

    print(f"bench {name}", file=sys.stderr)
    started = time.monotonic()
    command = [sys.executable, "-P", "-m", "cli.main", "admin", "bench", name, *(["--full"] if full else [])]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    minutes = (time.monotonic() - started) / 60
    print(f"bench {name} ended with exit code {ended.returncode} after {minutes:.0f} min", file=sys.stderr)
    if ended.returncode == 0:
        _RESULTS.mkdir(parents=True, exist_ok=True)
        (_RESULTS / f"{name}.json").write_bytes(ended.stdout)
    return ended.returncode == 0


def _first_sentence(path: Path) -> str:
    import ast

    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
