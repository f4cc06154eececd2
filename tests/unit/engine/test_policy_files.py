"""Version 0 of a run is made once, although rollouts that are started by hand make it at the same moment; digests."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from engine import policy_files
from engine.policy_files import file_sha256, link_version

CALLS = 8


def test_calls_at_the_same_moment_make_one_version(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "policies" / "adhoc-1" / "0.e0"
    model.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (model / name).write_bytes(name.encode() * 1000)
    barrier = Barrier(CALLS)

    def link(_: int) -> str:
        barrier.wait()
        return repr(link_version(model, directory))

    with ThreadPoolExecutor(CALLS) as pool:
        described = set(pool.map(link, range(CALLS)))
    assert len(described) == 1
    assert list(directory.parent.iterdir()) == [directory]


def test_a_version_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """Each try makes a directory of its own; on a full disk they would take the rest of it."""
    model, directory = tmp_path / "model", tmp_path / "policies" / "run" / "0.e0"
    (model / "unreadable.safetensors").mkdir(parents=True)  # neither linked nor copied
    (model / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):
        with pytest.raises(OSError, match="unreadable"):
            link_version(model, directory)
    assert list(directory.parent.iterdir()) == []


def test_a_version_that_cannot_take_its_place_is_refused(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "policies" / "run" / "0.e0"
    model.mkdir()
    directory.parent.mkdir(parents=True)
    directory.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"0\.e0"):
        link_version(model, directory)
    assert list(directory.parent.iterdir()) == [directory]


def test_what_a_killed_call_has_left_is_deleted_the_next_day(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "policies" / "run" / "0.e0"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    program = (
        "import os, signal, sys; from pathlib import Path; from engine import policy_files\n"
        "policy_files._link_or_copy = lambda model, building: os.kill(os.getpid(), signal.SIGKILL)\n"
        "policy_files.link_version(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", program, str(model), str(directory)], check=False)
        assert killed.returncode == -signal.SIGKILL
    old, new = directory.parent.iterdir()
    assert old.name.startswith("0.e0.building-")
    yesterday = time.time() - 100_000
    os.utime(old, (yesterday, yesterday))
    assert link_version(model, directory) == policy_files.describe_files(directory)
    assert sorted(directory.parent.iterdir()) == sorted([directory, new]), "another call may still be at work in it"


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 1000])
def test_a_digest_is_that_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(policy_files, "_PIECE_BYTES", 64)
    content = bytes(number % 251 for number in range(num_bytes))
    (tmp_path / "file").write_bytes(content)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()
