"""Make a file or a directory in one process at a time, in a scratch directory beside it."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet.progress import ReportProgress


@contextmanager
def making(target: Path, say: ReportProgress) -> Iterator[Path]:
    """Yield an empty scratch directory, on the disk of `target`, to the only process that makes `target` now.

    It waits, and says so, while another process makes it, so look inside the block whether it is there. The kernel
    releases the lock when a process ends, however it ends; the next deletes the scratch directory. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.making-"
    with _only_one(target, say):
        for left in target.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as scratch:
            yield Path(scratch)


@contextmanager
def _only_one(target: Path, say: ReportProgress) -> Iterator[None]:
    file = target.with_name(f".{target.name}.lock")
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is making {target}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink == 0:
                continue  # the process before has deleted the file that is locked here
            try:
                yield
            finally:
                file.unlink(missing_ok=True)  # while it is locked
            return
        finally:
            os.close(lock)
