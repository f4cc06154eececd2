"""Two processes make one target, and what a killed one leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ratchet.make_once import making

MAKE = """
import sys
from pathlib import Path
from ratchet.make_once import making
target = Path(sys.argv[1])
with making(target, lambda line: print(line, flush=True)) as scratch:
    if not target.exists():
        (scratch / "half").write_text("")
        print("making", flush=True)
        sys.stdin.readline()
        target.write_text("made")
"""


def start(target: Path, stdin: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Start a process that makes the target once its standard input ends."""
    command = [sys.executable, "-c", MAKE, str(target)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def test_the_second_process_waits_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "policy"
    first = start(target)
    assert first.stdout is not None and first.stdout.readline() == "making\n"
    second = start(target)
    assert second.stdout is not None
    assert second.stdout.readline() == f"another process is making {target}; waiting for it\n"
    first.communicate(timeout=60)
    assert first.returncode == 0 and target.read_text() == "made"
    assert second.communicate(timeout=60)[0] == ""
    assert list(target.parent.iterdir()) == [target]


def test_of_many_processes_one_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "policy"
    found = [one.communicate(timeout=100)[0] for one in [start(target, subprocess.DEVNULL) for _ in range(6)]]
    assert sum("making\n" in lines.splitlines(keepends=True) for lines in found) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_leaves_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    target, neighbour = tmp_path / "policy", tmp_path / ".policy-2.making-x"
    neighbour.mkdir()  # of another target
    process = start(target)
    assert process.stdout is not None and process.stdout.readline() == "making\n"
    (left,) = tmp_path.glob(".policy.making-*")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert (left / "half").exists()
    with making(target, print) as scratch:
        assert not left.exists() and list(scratch.iterdir()) == [] and neighbour.exists()
    assert not scratch.exists()
