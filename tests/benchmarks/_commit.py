"""The commit that a benchmark's figures belong to."""

import subprocess


def commit() -> str | None:
    """The short hash; None in a copy without a repository, such as one on a machine with a GPU."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
