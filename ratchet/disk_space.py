"""The free space of a disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import MachineError

_NEEDED_BYTES = 2 << 30
"""Least free space with which a stack starts."""


@dataclass(slots=True, frozen=True)
class FreeSpace:
    """Free space on the disk of a directory, as a share of the disk and in bytes; as text, one phrase."""

    path: Path
    share: float
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.share:.1%} ({self.free_bytes / 1e9:.1f} GB) of the disk of {self.path}"


def free_space(path: Path) -> FreeSpace:
    """Return the free space for unprivileged users on the disk of a directory, which need not exist yet."""
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    found = shutil.disk_usage(existing)
    return FreeSpace(path, found.free / found.total, found.free)


def require_space(home: Path) -> None:
    """Raise MachineError if the disk of the state directory has too little free space for a stack."""
    free = free_space(home).free_bytes
    if free < _NEEDED_BYTES:
        raise MachineError(
            f"only {free >> 20} MiB are free on the disk of {home}, {_NEEDED_BYTES >> 20} MiB are needed; "
            "free space or set RATCHET_HOME to another disk"
        )
