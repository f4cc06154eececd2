"""The Ray head runs while a run wants a learner. The part ends when its node has ended, so that it is restarted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cli.parts.ray import LOOK_SECONDS
from training.ray_demand import is_ray_wanted, note_ray_demand

PATIENCE_SECONDS = 240
_LATE_AGENTS = """
import sys, time
if "agent" in open("/proc/self/cmdline").read().split("--")[0]:
    time.sleep(60)
"""


def test_ray_is_wanted_for_a_while_after_the_last_note(tmp_path: Path) -> None:
    assert not is_ray_wanted(tmp_path)
    note_ray_demand(tmp_path)
    assert is_ray_wanted(tmp_path)
    os.utime(tmp_path / "ray.wanted", (0, time.time() - 1000))
    assert not is_ray_wanted(tmp_path)


def test_a_head_whose_raylet_gave_up_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """A raylet that gives up ends like one that receives SIGTERM; Ray's head itself goes on. Its agents start late, as
    on a busy machine.
    """
    (tmp_path / "sitecustomize.py").write_text(_LATE_AGENTS)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RATCHET_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }  # fmt: skip
    note_ray_demand(tmp_path)
    arguments = [sys.executable, "-m", "cli.main", "part", "ray"]
    with (tmp_path / "ray.log").open("w") as log:
        head = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
    own = psutil.Process(head.pid)
    everything: list[psutil.Process] = []
    try:
        raylet = _wait_for_child(own, "raylet", tmp_path / "ray.log")
        _wait_for(tmp_path / "ray.log", "Ray runtime started")
        while time.time() - raylet.create_time() < 3 * LOOK_SECONDS:  # old enough for the watch to have seen it
            time.sleep(0.2)
        everything = own.children(recursive=True)
        raylet.send_signal(signal.SIGTERM)
        assert head.wait(PATIENCE_SECONDS) != 0
        assert "raylet has ended" in (tmp_path / "ray.log").read_text()
        _, alive = psutil.wait_procs(everything, timeout=PATIENCE_SECONDS)
        assert not alive
    finally:
        for process in (*everything, *(own.children(recursive=True) if own.is_running() else ()), own):
            if process.is_running():
                process.kill()
        head.wait()


def _wait_for_child(process: psutil.Process, name: str, log: Path) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, log.read_text()
        for child in process.children(recursive=True):
            if child.name() == name:
                return child
        time.sleep(0.2)
    raise AssertionError(f"no {name} after {PATIENCE_SECONDS} s: {log.read_text()}")


def _wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
