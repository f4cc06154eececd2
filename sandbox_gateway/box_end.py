"""End the processes of a box whose boxd does not end them itself, and say which of them have not ended."""

import contextlib
import os
from pathlib import Path

import psutil


def boxd_pids(directory: Path) -> list[int]:
    """Return the processes that work in a box's directory, which only its boxd does."""
    wanted = directory.stat()
    found = []
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.path.samestat(os.stat(f"/proc/{process}/cwd"), wanted):
                    found.append(int(process))
    return found


def living_boxes(root_directory: Path) -> list[Path]:
    """Return the directories of the boxes of a gateway's root directory whose boxd lives."""
    boxes = (root_directory / "boxes").resolve()
    found = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):
                directory = Path(os.readlink(f"/proc/{process}/cwd"))
                if directory.parent == boxes:
                    found.add(directory)
    return sorted(found)


def kill_processes(directory: Path, timeout_seconds: float) -> list[psutil.Process]:
    """Kill the boxd of a box's directory and all processes below it, also suspended ones; return those that have not
    ended in time.

    A process that waits in the kernel, for example for a disk, ends only after that.
    """
    doomed: list[psutil.Process] = []
    for pid in boxd_pids(directory):
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            doomed += [top, *top.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(doomed, timeout=timeout_seconds)[1]


def any_runs(processes: list[psutil.Process]) -> bool:
    """Return whether one of the processes has not ended."""
    return any(process.is_running() for process in processes)
