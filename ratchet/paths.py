"""The directories of state and caches on this machine; no other module builds such a path."""

import os
from pathlib import Path


def home() -> Path:
    """Return the state directory of this checkout: RATCHET_HOME, or `.ratchet` in the working directory."""
    return Path(os.environ.get("RATCHET_HOME") or ".ratchet").expanduser().resolve()


def cache() -> Path:
    """Return the cache directory, shared between checkouts; its contents can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ratchet"


def images() -> Path:
    """Return the directory of images for local sandboxes, as `ratchet tasks images import` writes them."""
    return cache() / "images"


def tiny_policy(name: str, seed: int) -> Path:
    """Return the model directory of the tiny policy with this name, `tiny` or `tiny-curriculum`, and seed."""
    return home() / "models" / f"{name}-{seed}"


def pretrained(name: str) -> Path:
    """Return the model directory that `ratchet models get` makes."""
    return home() / "models" / name


def policies() -> Path:
    """Return the root of published policy versions, one directory each: `<run_id>/<step>.e<epoch>`."""
    return home() / "policies"


def checkpoints() -> Path:
    """Return the root of the learner's checkpoints."""
    return home() / "checkpoints"


def dump_requests() -> Path:
    """Return the directory of requests for debug dumps, one file per run (training/rollout_dumps.py)."""
    return home() / "rollout_dumps"


def archive() -> Path:
    """Return the root of archived turns: `<run_id>/<table>/<number>.parquet`."""
    return home() / "archive"
