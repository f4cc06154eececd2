"""Where state and caches live on this machine.

Why here: one place names the directories; nothing else builds such a path.
Called by: the CLI, `stack`, the worker and the learner.
"""

import os
from pathlib import Path


def home() -> Path:
    """State of this checkout's stack: RATCHET_HOME, else `.ratchet` in the working directory."""
    return Path(os.environ.get("RATCHET_HOME") or ".ratchet").expanduser().resolve()


def cache() -> Path:
    """Things that can be made again and are shared between checkouts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ratchet"


def images() -> Path:
    """Images for local sandboxes, as `ratchet images import` keeps them."""
    return cache() / "images"


def tiny_policy(seed: int) -> Path:
    return home() / "models" / f"tiny-{seed}"


def policies() -> Path:
    """Published policy versions, one directory each: `<run_id>/<step>.e<epoch>`."""
    return home() / "policies"


def checkpoints() -> Path:
    return home() / "checkpoints"


def tensorboard() -> Path:
    """Event files, one directory per run: `tensorboard --logdir` takes this one."""
    return home() / "tensorboard"
