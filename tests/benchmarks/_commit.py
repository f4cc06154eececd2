"""The commit that a benchmark's figures are of.

Why here: every benchmark prints it, and one runs on a machine that has nothing of ours installed.
Called by: the benchmarks beside this file.
"""

import subprocess


def commit() -> str | None:
    """None in a copy without a repository, as one is taken to a machine with a GPU."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
