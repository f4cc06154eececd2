"""The empty file system that the gateway makes once and that each box's disk copies (`boxd/box_disk.py`)."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from sandbox_gateway.boxd.box_disk import LOOP_CONTROL

# No journal: no data of a box must survive a crash of the machine, and each journal would be a kernel thread.
_MKFS_OPTIONS = shlex.split("-q -F -O ^has_journal,^resize_inode -E lazy_itable_init=1,nodiscard -m 0 -i 8192")


def is_possible() -> bool:
    return os.access(LOOP_CONTROL, os.R_OK | os.W_OK) and shutil.which("mkfs.ext4") is not None


def make_template(path: Path, size_bytes: int) -> None:
    """Make an empty file system of this size, about 100 KiB on disk. Raises OSError if it cannot be made."""
    fresh = path.with_suffix(".new")
    command = ["mkfs.ext4", *_MKFS_OPTIONS, str(fresh), f"{size_bytes >> 10}k"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"mkfs.ext4: {done.stderr.strip()[-200:]}")
    fresh.replace(path)
