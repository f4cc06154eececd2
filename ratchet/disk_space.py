"""The free space of a disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path


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
    existing = next(one for one in (path, *path.parents) if one.exists())
    found = shutil.disk_usage(existing)
    return FreeSpace(path, found.free / found.total, found.free)
