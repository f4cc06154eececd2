"""`ratchet config`: a run's config as it resolves here."""

from pathlib import Path
from typing import Annotated

import typer

from cli.up import DEFAULT_CONFIG


def config(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")] = DEFAULT_CONFIG,
    set: Annotated[list[str], typer.Option("--set", help="KEY=VALUE, over the file.")] = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of YAML.")] = False,
) -> None:
    """Print the resolved config: file, environment and --set together, every default filled in, paths absolute."""
    import sys

    import yaml

    from ratchet.config_sources import load_config

    resolved = load_config(config, set)
    print(resolved.model_dump_json()) if json else yaml.safe_dump(
        resolved.model_dump(mode="json"), sys.stdout, sort_keys=False
    )
