"""A box's current use, measured by the host: memory and CPU time from its control group, disk from its directory."""

import asyncio
import contextlib
import os

import psutil

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.boxd import cgroups

_BETWEEN_SECONDS = 0.1


async def take_sample(box: BoxClient) -> dict[str, float | int]:
    """Return the fields of E2B's SandboxMetric without its time. Zero if this machine has no control groups."""
    group = cgroups.cgroup_at(str(box.record.spec["cgroup"]))
    before = _cpu_seconds(group)
    await asyncio.sleep(_BETWEEN_SECONDS)
    used = max(0.0, _cpu_seconds(group) - before)
    memory, cache = group.memory_bytes()
    total_disk = total_disk_bytes(box)
    return {
        "cpuCount": os.cpu_count() or 1,
        "cpuUsedPct": round(100 * used / _BETWEEN_SECONDS, 1),
        "memUsed": memory,
        "memTotal": box.record.memory_bytes,
        "memCache": cache,
        "diskUsed": await asyncio.to_thread(_disk_used_bytes, box),
        "diskTotal": total_disk,
    }


def total_disk_bytes(box: BoxClient) -> int:
    """Return the box's own limit, or the free bytes of its directory's file system."""
    limit = int(box.record.spec.get("disk_bytes") or 0)
    if limit:
        return limit
    status = os.statvfs(box.directory)
    return status.f_bavail * status.f_frsize


def _disk_used_bytes(box: BoxClient) -> int:
    used = 0
    for folder, _names, files in os.walk(box.directory):
        for name in files:
            try:
                used += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return used


def _cpu_seconds(group: cgroups.Cgroup) -> float:
    total = 0.0
    for pid in group.process_ids():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total
