"""`ratchet admin config` and `env`: print a run's resolved config, and the variables of the stack for stock tools."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cli.up import DEFAULT_CONFIG
from ratchet.config_sources import load_config
from stack.parts import Stack
from stack.temporal_server import installed_temporal_cli


def config(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")] = DEFAULT_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of YAML.")] = False,
) -> None:
    """Print the resolved config: file, environment and --set merged, every default filled in, paths absolute."""
    resolved = load_config(config, set or [])
    print(resolved.model_dump_json()) if json else yaml.safe_dump(
        resolved.model_dump(mode="json"), sys.stdout, sort_keys=False
    )


def env() -> None:
    """Print `export` lines. After eval "$(ratchet admin env)", psql and the E2B SDK find the stack.

    So does temporal: PATH gets the directory of the CLI if it is in the cache, unless PATH has a temporal already.
    """
    for name, value in Stack().environment().items():
        print(f"export {name}={shlex.quote(value)}")
    temporal = installed_temporal_cli()
    if temporal is not None and shutil.which("temporal") is None:
        print(f'export PATH={shlex.quote(str(temporal.parent))}:"$PATH"')
