"""Room on the disk of the state directory."""

import os
from pathlib import Path

from ratchet.errors import MachineError


def nearest_existing(directory: Path) -> Path:
    """Return the directory, or the nearest one above it that exists."""
    return next(one for one in (directory, *directory.absolute().parents) if one.exists())


def require_space(home: Path, needed_bytes: int = 2 << 30) -> None:
    """Raise MachineError if the state directory's disk has less than `needed_bytes` free."""
    status = os.statvfs(nearest_existing(home))
    free = status.f_bavail * status.f_frsize
    if free < needed_bytes:
        raise MachineError(
            f"only {free >> 20} MiB are free on the disk of {home}, {needed_bytes >> 20} MiB are needed; "
            "free space or set RATCHET_HOME to another disk"
        )
