"""Memory and process limits, freezer and CPU accounting; only this module knows the files of cgroup v1 and v2."""

import contextlib
import errno
import os
import time
from dataclasses import dataclass, field
from functools import cache

MOUNT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
_LEAF = "ratchet-processes"
_V1_CONTROLLERS = ("memory", "pids", "freezer", "cpuacct")
_REMOVE_TRIES, _REMOVE_PAUSE_SECONDS = 100, 0.01
_MOVE_TRIES = 20
_SYSTEMCTL_SECONDS = 5


@dataclass(slots=True)
class Cgroup:
    """One box's control groups; `directories` is empty if the machine has none that we may write."""

    directories: list[str]
    version: int
    _procs: list[int] = field(default_factory=list)

    def create(self, memory_bytes: int, max_processes: int) -> None:
        for directory in self.directories:
            os.makedirs(directory, exist_ok=True)
        if self.version == 2:
            _write(f"{self.directories[0]}/memory.max", str(memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                _write(f"{self.directories[0]}/memory.swap.max", "0")
            _write(f"{self.directories[0]}/pids.max", str(max_processes))
        elif self.version == 1:
            _write(f"{self._v1('memory')}/memory.limit_in_bytes", str(memory_bytes))
            _write(f"{self._v1('pids')}/pids.max", str(max_processes))
        self._procs = [os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for group in self.directories]

    def join(self) -> None:
        """Move the calling process in; its later children start there."""
        for fd in self._procs:
            os.write(fd, b"0")

    @property
    def can_freeze(self) -> bool:
        return bool(self.directories)

    def freeze(self, frozen: bool) -> None:
        if self.version == 2:
            _write(f"{self.directories[0]}/cgroup.freeze", "1" if frozen else "0")
        elif self.version == 1:
            _write(f"{self._v1('freezer')}/freezer.state", "FROZEN" if frozen else "THAWED")

    def remove(self) -> None:
        """Remove the groups. A group stays busy until the kernel has reaped its last process."""
        for directory in self.directories:
            for _ in range(_REMOVE_TRIES):
                try:
                    os.rmdir(directory)
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(_REMOVE_PAUSE_SECONDS)

    def process_ids(self) -> set[int]:
        found: set[int] = set()
        for directory in self.directories:
            try:
                found.update(int(line) for line in _read(f"{directory}/cgroup.procs").split())
            except OSError:
                continue
        return found

    def memory_bytes(self) -> tuple[int, int]:
        """Return (bytes in use without page cache, bytes of page cache)."""
        if self.version == 0:
            return 0, 0
        directory = self.directories[0]
        names = ("memory.current", "file") if self.version == 2 else ("memory.usage_in_bytes", "cache")
        try:
            usage = int(_read(f"{directory}/{names[0]}"))
            statistics = dict(line.split() for line in _read(f"{directory}/memory.stat").splitlines())
        except (OSError, ValueError):
            return 0, 0
        cache = int(statistics.get(names[1], 0))
        return max(0, usage - cache), cache

    def _v1(self, controller: str) -> str:
        return self.directories[_V1_CONTROLLERS.index(controller)]


def cgroup_at(name: str) -> Cgroup:
    """Return the control groups at a path below the mount, without creating them. An empty name means none."""
    if not name:
        return Cgroup([], 0)
    if _is_v2():
        return Cgroup([f"{MOUNT}/{name}"], 2)
    return Cgroup([f"{MOUNT}/{controller}/{name}" for controller in _V1_CONTROLLERS], 1)


def usable_version() -> int:
    """Return 2 or 1 if memory and pids can be limited with that cgroup version, 0 if neither is writable."""
    if _is_v2():
        return 2 if _usable_group() is not None else 0
    return 1 if all(_writable(f"{MOUNT}/{controller}") for controller in _V1_CONTROLLERS) else 0


def name_of(name: str) -> str:
    """Return the path below the mount of the group `name` that this process's user may make."""
    return f"{(_usable_group() or '') if _is_v2() else ''}/{name}".strip("/")


def _is_v2() -> bool:
    return os.path.exists(f"{MOUNT}/cgroup.controllers")


def why_unusable() -> str:
    """Return why `usable_version` is 0."""
    group = _shared_group() if _is_v2() else None
    return _lacks_delegation(group) if group is not None else f"no writable control groups at {MOUNT}"


def _usable_group() -> str | None:
    group = _shared_group()
    return None if group is None or _lacks_delegation(group) else group


def _shared_group() -> str | None:
    """Return the path below the mount of the v2 group in which this process's user may make groups with limits: the
    mount itself, or the process's own group if it is delegated to the user (systemd's `Delegate=yes`, a SLURM step)."""
    own = [line.strip()[3:] for line in _read(OWN).splitlines() if line.startswith("0::")]
    for group in ("", *(path.removesuffix(f"/{_LEAF}").rstrip("/") for path in own)):
        directory = MOUNT + group
        # Who moves a process needs the right on the `procs` of the group above both ends, too.
        files = (f"{directory}/cgroup.{name}" for name in ("subtree_control", "procs"))
        may_share = _writable(directory) and all(os.access(file, os.W_OK) for file in files)
        if may_share and {"memory", "pids"} <= set(_read(f"{directory}/cgroup.controllers").split()):
            return group
    return None


@cache
def _lacks_delegation(group: str) -> str:
    """Return why a group does not belong to its processes, else an empty text. All below a user's systemd is writable
    to the user, but if the kernel kills a process for memory in a unit without `Delegate=yes`, systemd ends the unit,
    and the stack with it. systemd is asked once per process."""
    _, is_of_user, path = group.partition("/user@")
    if not is_of_user:
        return ""
    from subprocess import SubprocessError, run

    units = [name for name in path.split("/")[1:] if name.endswith((".service", ".scope"))]
    if not units:
        return f"control group {group} is no unit's"
    show = ["systemctl", "--user", "show", "--property=Delegate", "--", units[-1]]
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}", **os.environ}
    try:
        asked = run(show, capture_output=True, text=True, check=False, env=environment, timeout=_SYSTEMCTL_SECONDS)
    except (OSError, SubprocessError) as error:
        return f"systemd does not say whether unit {units[-1]} has Delegate=yes ({error})"
    return "" if "yes" in asked.stdout else f"unit {units[-1]} has no Delegate=yes"


def prepare_parent(name: str, *, moves_processes: bool) -> None:
    """Create the gateway's group and, on v2, give memory and pids to its boxes.

    The kernel refuses the latter with EBUSY below a group that contains processes, such as a delegated one: they move
    to a leaf, if allowed. Raises OSError if refused.
    """
    version = usable_version()
    if version == 2:
        _give_controllers(os.path.dirname(f"{MOUNT}/{name}"), moves_processes)
        os.makedirs(f"{MOUNT}/{name}", exist_ok=True)
        _give_controllers(f"{MOUNT}/{name}", moves_processes=False)
    for directory in cgroup_at(name).directories if version else ():
        os.makedirs(directory, exist_ok=True)


def _give_controllers(directory: str, moves_processes: bool) -> None:
    for tries_left in reversed(range(_MOVE_TRIES if moves_processes else 1)):
        try:
            return _write(f"{directory}/cgroup.subtree_control", "+memory +pids")
        except OSError as error:
            if error.errno != errno.EBUSY or not tries_left:
                raise
        os.makedirs(f"{directory}/{_LEAF}", exist_ok=True)
        for process_id in _read(f"{directory}/cgroup.procs").split():  # they may fork meanwhile: hence the tries
            with contextlib.suppress(ProcessLookupError):
                _write(f"{directory}/{_LEAF}/cgroup.procs", process_id)


def remove_parent(name: str) -> None:
    """Remove the gateway's own group if it contains no box."""
    for directory in cgroup_at(name).directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def children(parent: str) -> set[str]:
    """Return the names of the groups below `parent` under any controller."""
    found: set[str] = set()
    for directory in cgroup_at(parent).directories:
        if os.path.isdir(directory):
            found.update(entry.name for entry in os.scandir(directory) if entry.is_dir())
    return found


def used_cpu_seconds(parent: str) -> float:
    """Return the CPU seconds of all boxes below `parent`, also of ended ones; 0 without accounting."""
    group = cgroup_at(parent)
    with contextlib.suppress(OSError):
        if group.version == 1:
            return int(_read(f"{MOUNT}/cpuacct/{parent}/cpuacct.usage")) / 1e9
        if group.version == 2:
            usage = dict(line.split() for line in _read(f"{MOUNT}/{parent}/cpu.stat").splitlines())
            return int(usage["usage_usec"]) / 1e6
    return 0.0


def end_leftover(name: str) -> None:
    """Kill the processes of group `name`, which a dead boxd left behind, and remove the group."""
    group = cgroup_at(name)
    if group.can_freeze:
        with contextlib.suppress(OSError):
            group.freeze(False)
    for process_id in group.process_ids():
        try:
            os.kill(process_id, 9)
        except ProcessLookupError:
            continue
    group.remove()


def _writable(directory: str) -> bool:
    return os.path.isdir(directory) and os.access(directory, os.W_OK)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    # The kernel answers a try to create a missing file with EACCES.
    with open(path, "w", opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT)) as file:
        file.write(text)
