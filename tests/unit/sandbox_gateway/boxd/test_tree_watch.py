"""Processes of a pid namespace that exceed its limits."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest

from sandbox_gateway.boxd import tree_watch
from sandbox_gateway.boxd.tree_watch import TreeWatch

_UNLIMITED = 1 << 40
_HELD_BYTES = 64 << 20
_SLEEPERS = """
for _ in 1 2 3; do sleep 600 & started="$! $started"; done
echo $started
for pid in $started; do wait $pid; echo $pid; done
read _
"""
_ONE = """
"$0" -c "$1" & wait
echo $!
read _
"""
_ODD_NAME = f"""
import ctypes, time
memory = b"x" * {_HELD_BYTES}
ctypes.CDLL(None).prctl(15, b"\\xff) Z 0\\n\\x85")
print("ready", flush=True)
time.sleep(600)
"""
_FIRST_THREAD_ENDS = f"""
import ctypes, threading, time
def hold():
    memory = b"x" * {_HELD_BYTES}
    while "zombie" not in open("/proc/self/status").read():
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
_MEMFD = f"""
import os, time
fd = os.memfd_create("odd")
for _ in range({_HELD_BYTES >> 20}):
    os.write(fd, bytes(1 << 20))
if "fork" in "FORKS":
    os.fork() or time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an own pid namespace takes root")


@dataclass
class Namespace:
    """`init`: pid of its first process outside."""

    output: IO[bytes]
    first_line: bytes
    init: int


@contextmanager
def namespace(script: str, *arguments: str) -> Iterator[Namespace]:
    """Run a script of bash as the first process of a pid namespace until it has written a line."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script, *arguments]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        try:
            yield Namespace(process.stdout, line, init)
            assert process.poll() is None
        finally:
            process.kill()


def test_the_newest_processes_end_and_never_the_first() -> None:
    with namespace(_SLEEPERS) as found:
        newest, middle, oldest = map(int, found.first_line.split())
        watch = TreeWatch(found.init, memory_bytes=_UNLIMITED, max_processes=3)
        watch.enforce(0.0)
        assert int(found.output.readline()) == newest
        watch.enforce(watch.next_look)
        assert all(Path(f"/proc/{found.init}/root/proc/{pid}/cmdline").read_bytes() for pid in (1, middle, oldest))
        strict = TreeWatch(found.init, memory_bytes=0, max_processes=2)
        strict.enforce(strict.next_look)
        assert [int(found.output.readline()) for _ in range(2)] == [middle, oldest]
        strict.enforce(strict.next_look)


@pytest.mark.parametrize(
    "program", (_ODD_NAME, _FIRST_THREAD_ENDS, _MEMFD), ids=("odd_name", "first_thread_ended", "memfd")
)
def test_the_memory_of_an_odd_process_counts(program: str) -> None:
    with namespace(_ONE, sys.executable, program) as found:
        assert found.first_line == b"ready\n"
        roomy = TreeWatch(found.init, memory_bytes=2 * _HELD_BYTES, max_processes=100)
        roomy.enforce(0.0)
        assert not roomy._killed
        TreeWatch(found.init, memory_bytes=_HELD_BYTES, max_processes=100).enforce(0.0)
        assert int(found.output.readline()) > 1


def test_a_memfd_counts_once_if_several_processes_have_it_open() -> None:
    with namespace(_ONE, sys.executable, _MEMFD.replace("FORKS", "fork")) as found:
        watch = TreeWatch(found.init, memory_bytes=2 * _HELD_BYTES, max_processes=100)
        watch.enforce(0.0)
        assert sorted(watch._memfds.values()) == [0] + [_HELD_BYTES // 2] * 2 and not watch._killed


def test_a_memfd_that_grows_during_a_look_counts_once() -> None:
    with namespace(_ONE, sys.executable, _MEMFD.replace("FORKS", "fork")) as found:
        watch = TreeWatch(found.init, memory_bytes=2 * _HELD_BYTES, max_processes=100)
        find, grown = watch._memfds_of, itertools.count(1)

        def grow(pid: int) -> tuple[dict[tuple[int, int], int], int]:
            """Play that the memfd had half of its size, and less before, when the process was asked."""
            memfds, num_files = find(pid)
            return {key: size // 2 + next(grown) for key, size in memfds.items()}, num_files

        watch._memfds_of = grow  # type: ignore[method-assign]
        watch.enforce(0.0)
        assert sorted(watch._memfds.values()) == [0] + [_HELD_BYTES // 4 + 1] * 2, "the newest size, divided by two"


def test_a_look_asks_few_open_files_and_the_next_ones_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_watch, "_FILES_PER_LOOK", 1)
    with namespace(_ONE, sys.executable, _MEMFD.replace("FORKS", "fork")) as found:
        watch = TreeWatch(found.init, memory_bytes=2 * _HELD_BYTES, max_processes=100)
        pids = {int(name) for name in os.listdir(watch._proc) if name.isdigit()}
        sums = [sum(watch._find_memfds(pids).values()) for _ in range(6)]
        assert len(pids) == 3 and sums[2:] == [_HELD_BYTES] * 4
        asked = [next(reversed(watch._open_memfds)) for _ in range(6) if watch._find_memfds(pids)]
        assert asked[:3] == asked[3:] and set(asked) == pids


def test_an_ended_process_counts_nothing() -> None:
    """It was read before it ended, as a child is that shares its parent's memory until it starts a program."""
    with namespace(_SLEEPERS) as found:
        pid = int(found.first_line.split()[0])
        watch = TreeWatch(found.init, memory_bytes=_UNLIMITED, max_processes=100)
        usage = watch._read(pid)
        assert usage is not None and watch._read_exactly(usage) is not None
        key = watch._key(pid)
        assert watch._kill(usage) and set(watch._killed) == {key}
        assert int(found.output.readline()) == pid
        assert watch._read(pid) is None and watch._read_exactly(usage) is None
        watch.enforce(0.0)
        assert not watch._killed


def test_a_killed_process_is_left_out_for_some_looks_only() -> None:
    """A reused pid is another process. The kill is played, because no process of a test survives one."""
    with namespace(_SLEEPERS) as found:
        newest, middle, _oldest = map(int, found.first_line.split())
        watch = TreeWatch(found.init, memory_bytes=_UNLIMITED, max_processes=3)
        both = {watch._key(middle), watch._key(newest)}
        watch._killed = {watch._key(newest): 2, (middle, "0"): 100}
        watch.enforce(0.0)
        assert set(watch._killed) == {watch._key(newest)}
        watch.enforce(watch.next_look)
        assert set(watch._killed) == both, "the end of the newest comes too late to count"
