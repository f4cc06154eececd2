"""CPU seconds of the local stack, by part: what a rollout costs, and where.

Why here: on one machine CPU is what bounds a run; a figure per part tells where to look first.
Called by: `ratchet train`, which samples while it watches.

A part's account is its process tree's: what lives now, and what has been waited for. Boxes are accounted by their control group; where
the machine has none they are missing.
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
    """Adds up what every part has used since the first sample, through restarts of parts."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.used: dict[str, float] = defaultdict(float)
        self._last = self._read()

    def sample(self) -> None:
        """To be called every few seconds: what a part used between a sample and its death is not seen."""
        now = self._read()
        for key, seconds in now.items():
            before = self._last.get(key, 0.0)
            self.used[key[0]] += max(0.0, seconds - before)
        self._last |= now

    def _read(self) -> dict[tuple[str, int], float]:
        """(part, pid of its root) → CPU seconds so far."""
        children, seconds = _processes()
        found = {}
        for state in Supervisor(self.stack).states():
            if state.pid is not None:
                found[_NAMES.get(state.name, state.name), state.pid] = _tree_seconds(state.pid, children, seconds)
        if self.stack.has_gateway:
            found[BOXES, 0] = used_cpu_seconds(cgroup_parent(self.stack.home / "boxes"))
        return found


def _processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Pid → its children, and pid → seconds of its own and of those it has waited for."""
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
