"""The version of the code that a worker runs, as Temporal records it with each task that the worker completes."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CHECKOUT = Path(__file__).parent.parent
_GIT_SECONDS = 10.0


def build_id() -> str:
    """Return `version+commit`, with `.changed` if a tracked file differs; only the version outside of a checkout."""
    try:
        name = version("ratchet-rl")
    except PackageNotFoundError:
        name = "unknown"
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return name
    changed = ".changed" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{name}+{commit}{changed}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_CHECKOUT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
