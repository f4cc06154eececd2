"""Limits of a box's memory and processes on a machine without control groups for it.

boxd adds up the processes that the box's own /proc lists, which are all of its pid namespace, and kills some if they
exceed a limit together: the largest for memory, as the kernel does, and the newest for processes. Memory that no
process maps or has open as a memfd, such as files in /dev/shm, is not seen. Of a process's memfds only what exceeds its
mapped shared memory is counted, so that a box can hold up to twice its limit.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

_LOOK_SECONDS = 0.5
_LOOKS_TO_END = 20
_FILES_PER_LOOK = 5_000
"""Open files, of whole processes, that one look asks for memfds; the other processes' are asked in the next ones."""
_INIT = 1
_ENDED = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class _Usage:
    """`memory_bytes`: anonymous, shared and swapped memory, without files. `path`: in /proc, of a living thread."""

    pid: int
    path: str
    num_threads: int
    memory_bytes: int


class TreeWatch:
    def __init__(self, init_pid: int, memory_bytes: int, max_processes: int) -> None:
        opened = os.open(f"/proc/{init_pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._proc = f"/proc/self/fd/{opened}"
        self._memory_bytes = memory_bytes
        self._max_processes = max_processes
        self._killed: dict[tuple[int, str], int] = {}
        """Pid and start time of killed processes that have not ended, with the looks in which they are left out."""
        self._open_memfds: dict[int, dict[tuple[int, int], int]] = {}
        """Pid → device and inode → bytes of the memfds that the process has open, the longest known first."""
        self._memfds: dict[int, int] = {}
        """Pid → bytes of these memfds, divided among the processes that have them open."""
        self.next_look = 0.0

    def enforce(self, now: float) -> None:
        """Look and kill, if it is time to."""
        if now < self.next_look:
            return
        self.next_look = now + _LOOK_SECONDS
        self._killed = {key: looks - 1 for key, looks in self._killed.items() if self._key(key[0]) == key}
        ending = {pid for (pid, _started), looks in self._killed.items() if looks > 0}
        pids = {int(name) for name in os.listdir(self._proc) if name.isdigit()} - ending
        self._memfds = self._find_memfds(pids)
        living = [usage for pid in pids if (usage := self._read(pid)) is not None]
        newest = sorted(living, key=attrgetter("pid"), reverse=True)
        excess = sum(usage.num_threads for usage in living) - self._max_processes
        killed = self._kill_excess(newest, excess, attrgetter("num_threads"))
        living = [usage for usage in living if usage not in killed]
        memory = attrgetter("memory_bytes")
        if sum(map(memory, living)) > self._memory_bytes:
            exact = [found for usage in living if (found := self._read_exactly(usage)) is not None]
            excess = sum(map(memory, exact)) - self._memory_bytes
            self._kill_excess(sorted(exact, key=memory, reverse=True), excess, memory)

    def _kill_excess(self, usages: list[_Usage], excess: int, size: Callable[[_Usage], int]) -> set[_Usage]:
        """Kill in this order until no excess is left, and return those whose size it was reduced by."""
        killed = set()
        for usage in usages:
            if excess > 0 and self._kill(usage):
                excess -= size(usage)
                killed.add(usage)
        return killed

    def _kill(self, usage: _Usage) -> bool:
        """Return False if that frees nothing: it was killed before, or is the box's first, with which the box ends."""
        if usage.pid == _INIT:
            return False
        try:
            process = os.open(f"{self._proc}/{usage.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except _ENDED:
            return True
        try:
            key = self._key(usage.pid)
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except _ENDED:
            return True
        finally:
            os.close(process)
        is_first = key not in self._killed
        self._killed.setdefault(key, _LOOKS_TO_END)
        return is_first

    def _read(self, pid: int) -> _Usage | None:
        """Count pages that processes share in each of them. Return None for a process that has ended."""
        for path in self._threads(pid):
            fields = self._fields(f"{path}/status")
            if "RssAnon" in fields:  # a first thread that has ended has none, although others may live
                shared = max(_bytes(fields, "RssShmem"), self._memfds.get(pid, 0))
                return _Usage(pid, path, int(fields["Threads"]), _bytes(fields, "RssAnon", "VmSwap") + shared)
        return None

    def _threads(self, pid: int) -> Iterator[str]:
        """Yield the process's directory in /proc, then those of its threads."""
        yield f"{pid}"
        with contextlib.suppress(*_ENDED):
            yield from (f"{pid}/task/{thread}" for thread in os.listdir(f"{self._proc}/{pid}/task"))

    def _key(self, pid: int) -> tuple[int, str]:
        """Return a process's pid and start time, which together no other has."""
        return pid, "".join(self._text(f"{pid}/stat").rpartition(")")[2].split()[19:20])

    def _read_exactly(self, usage: _Usage) -> _Usage | None:
        """Divide pages among the processes that share them, which takes the kernel long."""
        fields = self._fields(f"{usage.path}/smaps_rollup")
        if "Pss_Anon" not in fields:  # it has ended, or this kernel does not tell
            return self._read(usage.pid)
        shared = max(_bytes(fields, "Pss_Shmem"), self._memfds.get(usage.pid, 0))
        return _Usage(usage.pid, usage.path, usage.num_threads, _bytes(fields, "Pss_Anon", "SwapPss") + shared)

    def _find_memfds(self, pids: set[int]) -> dict[int, int]:
        """Find memfds, whose memory need not be mapped, and divide each among the processes that have it open."""
        self._open_memfds = {pid: found for pid, found in self._open_memfds.items() if pid in pids}
        num_left = _FILES_PER_LOOK
        for pid in [*(pids - self._open_memfds.keys()), *self._open_memfds]:
            if num_left > 0:
                self._open_memfds.pop(pid, None)
                self._open_memfds[pid], num_files = self._memfds_of(pid)
                num_left -= num_files
        sizes: dict[tuple[int, int], int] = {}
        for found in self._open_memfds.values():
            sizes |= found
        num_holders = Counter(key for found in self._open_memfds.values() for key in found)
        return {pid: sum(sizes[key] // num_holders[key] for key in found) for pid, found in self._open_memfds.items()}

    def _memfds_of(self, pid: int) -> tuple[dict[tuple[int, int], int], int]:
        """Return device and inode → bytes of a process's memfds, and the number of its open files."""
        found, names = {}, list[str]()
        with contextlib.suppress(*_ENDED, PermissionError):
            names = os.listdir(f"{self._proc}/{pid}/fd")
        for name in names:
            with contextlib.suppress(*_ENDED, PermissionError):
                if os.readlink(f"{self._proc}/{pid}/fd/{name}").startswith("/memfd:"):
                    entry = os.stat(f"{self._proc}/{pid}/fd/{name}")
                    found[entry.st_dev, entry.st_ino] = entry.st_blocks * 512
        return found, len(names)

    def _fields(self, path: str) -> dict[str, str]:
        pairs = [line.partition(":") for line in self._text(path).split("\n")]
        return {name: value.strip() for name, _, value in pairs}

    def _text(self, path: str) -> str:
        """Return a file's text; none if the process has ended, or if the box may not read its program."""
        try:
            with open(f"{self._proc}/{path}", errors="replace") as file:  # names of processes have any bytes
                return file.read()
        except (*_ENDED, PermissionError):
            return ""


def _bytes(fields: dict[str, str], *names: str) -> int:
    """Add fields such as `12 kB`; a missing one is 0."""
    return sum(int(fields.get(name, "0").split()[0]) << 10 for name in names)
