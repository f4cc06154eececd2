"""`ratchet admin config`: print a run's resolved config."""

from pathlib import Path
from typing import Annotated

import typer

from cli.up import DEFAULT_CONFIG


def config(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")] = DEFAULT_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of YAML.")] = False,
) -> None:
    """Print the resolved config: file, environment and --set merged, every default filled in, paths absolute."""
    import sys

    import yaml

    from ratchet.config_sources import load_config

    resolved = load_config(config, set or [])
    print(resolved.model_dump_json()) if json else yaml.safe_dump(
        resolved.model_dump(mode="json"), sys.stdout, sort_keys=False
    )
