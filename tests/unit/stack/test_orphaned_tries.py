"""A worker is taken for ended only if it is known to be one of this state directory, machine and container."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stack.orphaned_tries import _process, ended_workers, note_worker


def identity(pid: int) -> str:
    return f"{pid}@{socket.gethostname()}"


def test_a_worker_lives_until_it_has_ended(tmp_path: Path) -> None:
    code = "import sys, pathlib; from stack.orphaned_tries import note_worker; note_worker(pathlib.Path(sys.argv[1])); "
    code += "print(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        note_worker(tmp_path)
        assert ended_workers(tmp_path) == {}
        child.communicate(b"\n")
    assert ended_workers(tmp_path) == {identity(child.pid): tmp_path / "workers" / str(child.pid)}


def test_another_process_with_the_same_number_is_not_the_worker(tmp_path: Path) -> None:
    note_worker(tmp_path)
    own = tmp_path / "workers" / str(os.getpid())
    own.write_text(own.read_text() + "0")  # ten times as late
    assert list(ended_workers(tmp_path)) == [identity(os.getpid())]


@pytest.mark.parametrize("place", ["another-host boot pid:[1]", f"{socket.gethostname()} another-boot pid:[1]"])
def test_workers_of_other_machines_and_containers_are_left_alone(tmp_path: Path, place: str) -> None:
    note_worker(tmp_path)
    (tmp_path / "workers" / "7").write_text(f"{place} 5")
    assert ended_workers(tmp_path) == {}
    assert _process(2**22 + 1).endswith(" 0"), "no process has this number"


def test_a_directory_without_workers(tmp_path: Path) -> None:
    assert ended_workers(tmp_path) == {}
