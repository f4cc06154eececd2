"""End the processes of a box whose boxd does not end them itself, and say which of them have not ended."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from sandbox_gateway.box_client import RECORD_FILE
from sandbox_gateway.boxd import cgroups

_LOOK_SECONDS = 0.05


def boxd_pids(directory: Path) -> list[int]:
    """Return the processes that work in a box's directory, which only its boxd does."""
    wanted = directory.stat()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.path.samestat(os.stat(f"/proc/{pid}/cwd"), wanted):
                found.append(pid)
    return found


def living_boxes(root_directory: Path) -> list[Path]:
    """Return the directories of the boxes of a gateway's root directory whose boxd lives."""
    boxes = (root_directory / "boxes").resolve()
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            directory = Path(os.readlink(f"/proc/{pid}/cwd"))
            if directory.parent == boxes:
                found.add(directory)
    return sorted(found)


def metadata_of(directory: Path) -> dict[str, str]:
    """Return the metadata of a box's record; none if it cannot be read."""
    try:
        return dict(_record_of(directory)["metadata"])
    except (OSError, ValueError, KeyError):
        return {}


def kill_processes(directory: Path, timeout_seconds: float) -> list[psutil.Process]:
    """Kill the boxd of a box's directory and all processes below it, also suspended and frozen ones; return those that
    have not ended in time.

    A process that waits in the kernel, for example for a disk, ends only after that.
    """
    doomed: list[psutil.Process] = []
    for pid in boxd_pids(directory):
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            doomed += [top, *top.children(recursive=True)]
    _thaw(directory)
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + timeout_seconds
    while any_runs(doomed) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return [process for process in doomed if _runs(process)]


def processes_of_users(first_uid: int, number: int) -> list[psutil.Process]:
    """Return the processes of these users that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if first_uid <= process.uids().real < first_uid + number and _runs(process):
                found.append(process)
    return found


def any_runs(processes: list[psutil.Process]) -> bool:
    """Return whether one of the processes has not ended."""
    return any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process can still act: one that its parent has not reaped cannot, except by other threads."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _record_of(directory: Path) -> dict[str, Any]:
    """Return a box's record as it was written, also by a gateway whose records have other fields."""
    record: dict[str, Any] = json.loads((directory / RECORD_FILE).read_bytes())
    return record


def _thaw(directory: Path) -> None:
    """Thaw a paused box: in a frozen control group of version 1 no process dies."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # a box without a record, or without control groups
        group = cgroups.cgroup_at(str(_record_of(directory)["spec"]["cgroup"]))
        group.freeze(False)
