"""CPU seconds of the local stack by part, to show what a rollout costs and which part uses it.

A part's figure is that of its process tree: living processes and children that they have waited for. Boxes are
measured by their control group; on a machine without control groups they are missing.
"""

from collections import defaultdict

import psutil

from sandbox_gateway.box_fleet import cgroup_parent
from sandbox_gateway.boxd.cgroups import used_cpu_seconds
from stack.parts import Stack
from stack.supervisor import Supervisor

BOXES = "boxes"
_NAMES = {"ray": "ray and ranks"}


class CpuMeter:
    """Add up the CPU seconds of every part since the first sample, including parts that were restarted."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.used: dict[str, float] = defaultdict(float)
        self._last = self._read()

    def sample(self) -> None:
        """Take a sample, every few seconds: what a part uses between its last sample and its end is not counted."""
        now = self._read()
        for key, seconds in now.items():
            before = self._last.get(key, 0.0)
            self.used[key[0]] += max(0.0, seconds - before)
        self._last |= now

    def _read(self) -> dict[tuple[str, int], float]:
        """Return (part, pid of its root process) → CPU seconds so far."""
        children, seconds = _processes()
        found = {}
        for state in Supervisor(self.stack).states():
            if state.pid is not None:
                found[_NAMES.get(state.name, state.name), state.pid] = _tree_seconds(state.pid, children, seconds)
        if self.stack.has_gateway:
            found[BOXES, 0] = used_cpu_seconds(cgroup_parent(self.stack.home / "boxes"))
        return found


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it has started."""
    return _tree_seconds(pid, *_processes())


def _processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return pid → its children, and pid → CPU seconds of the process and of the children that it has waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for process in psutil.process_iter(["pid", "ppid", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            children[process.info["ppid"]].append(process.info["pid"])
            seconds[process.info["pid"]] = times.user + times.system + times.children_user + times.children_system
    return children, seconds


def _tree_seconds(root: int, children: dict[int, list[int]], seconds: dict[int, float]) -> float:
    return seconds.get(root, 0.0) + sum(_tree_seconds(child, children, seconds) for child in children.get(root, []))
