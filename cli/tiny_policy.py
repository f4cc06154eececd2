"""`ratchet tiny-policy`: make the small default policy."""

from pathlib import Path
from typing import Annotated

import typer


def make_tiny_policy_command(
    seed: Annotated[int, typer.Option(help="Seed of the warm start.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output directory. Default: inside the state directory.")] = None,
) -> None:
    """Make the tiny Qwen3 that learns on a laptop: tokenizer, warm start, self-check (a few minutes on two cores)."""
    from cli.console import say
    from ratchet import paths
    from stack.tiny_policy.build import make_tiny_policy

    directory = out or paths.tiny_policy(seed)
    make_tiny_policy(directory, seed, say)
    say(f"the policy was written to {directory}")
