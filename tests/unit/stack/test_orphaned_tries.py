"""A worker process is known by its identity, and taken for ended only if it was one of this machine."""

import os
import subprocess
import sys

from stack.orphaned_tries import WorkerProcess


def test_a_process_lives_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = WorkerProcess.of(child.pid)
    assert WorkerProcess.read(worker.identity) == worker
    assert not worker.has_ended()
    child.communicate(b"\n")
    assert worker.has_ended()


def test_another_process_with_the_same_number_is_not_the_worker() -> None:
    own = WorkerProcess.of(os.getpid())
    assert own._replace(started=own.started - 1).has_ended() and not own.has_ended()


def test_processes_of_other_machines_and_containers_are_left_alone() -> None:
    own = WorkerProcess.of(os.getpid())
    elsewhere = own._replace(pid=2**22 + 1, place="another-host/0123abcd/4026531836")
    assert not elsewhere.has_ended() and own._replace(pid=2**22 + 1).has_ended()


def test_identities_of_other_programs_are_not_read() -> None:
    for identity in ("", "123@host", "temporal-cli:root@host", "x@host/1/2#2"):
        assert WorkerProcess.read(identity) is None
