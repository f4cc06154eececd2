"""`ratchet models tiny-policy`: make one of the small policies."""

from pathlib import Path
from typing import Annotated

import typer

from ratchet.config import TINY, TINY_POLICIES


def tiny_policy(
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the warm start.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output directory. Default: inside the state directory.")] = None,
    name: Annotated[str, typer.Option(help=f"{' or '.join(TINY_POLICIES)}, as in a config's `model`.")] = TINY,
) -> None:
    """Make the tiny Qwen3 that learns on a laptop: tokenizer, warm start, self-check (a few minutes on two cores)."""
    from cli.console import say
    from examples.recipes import RECIPES
    from examples.tiny_policy.build import make_tiny_policy
    from ratchet import paths
    from ratchet.errors import ConfigError

    if name not in RECIPES:
        raise ConfigError(f"--name: there is no policy {name!r}; it is one of {', '.join(RECIPES)}")
    directory = out or paths.tiny_policy(name, seed)
    make_tiny_policy(directory, seed, say, RECIPES[name])
    say(f"the policy was written to {directory}")
