"""A vLLM that was killed leaves no process behind, also if one is suspended and has set its title; its arguments."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.process import (
    EngineSettings,
    _write_pidfile,
    end_leftover_engines,
    session_members,
    vllm_command,
    vllm_environment,
)
from engine.vllm_plugin import WORKER_EXTENSION
from ratchet.start_variables import start_variables

CORE = "import setproctitle, signal; setproctitle.setproctitle('VLLM::EngineCore' + 'x' * 4000); signal.pause()"
"""Like vLLM's engine core: its title overwrites the environment that /proc shows."""
SERVER = f"""
import signal, subprocess, sys
core = subprocess.Popen([sys.executable, "-c", {CORE!r}])
other = subprocess.Popen(["sleep", "600"], env={{}})
print(core.pid, other.pid, flush=True)
signal.pause()
"""


def test_a_suspended_process_without_its_environment_is_ended(tmp_path: Path) -> None:
    settings = EngineSettings(
        model_path=tmp_path, port=1, database_url="unused", state_dir=tmp_path, policies_root=tmp_path
    )
    # glibc moves GLIBC_TUNABLES elsewhere, and a title ends in front of such a gap.
    environment = {name: value for name, value in vllm_environment(settings).items() if name != "GLIBC_TUNABLES"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    core, other = map(int, server.stdout.readline().split())
    try:
        while b"RATCHET_ENGINE_PIDFILE" in Path(f"/proc/{core}/environ").read_bytes():
            time.sleep(0.01)
        assert sorted(session_members(server.pid, settings)) == sorted([server.pid, core])
        _write_pidfile(settings.pidfile, server.pid)
        os.kill(core, signal.SIGSTOP)
        server.kill()
        server.wait()
        end_leftover_engines(settings)
        assert session_members(server.pid, settings) == []
        assert Path(f"/proc/{other}").exists(), "a process that is not the engine's was ended"
    finally:
        os.kill(other, signal.SIGKILL)
        server.stdout.close()


@pytest.mark.parametrize("changed", ["start", "boot", "none"])
def test_a_session_that_got_the_number_since_is_left_alone(tmp_path: Path, changed: str) -> None:
    settings = EngineSettings(
        model_path=tmp_path, port=1, database_url="unused", state_dir=tmp_path, policies_root=tmp_path
    )
    foreign = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        _write_pidfile(settings.pidfile, foreign.pid)
        wrapper, server, space = settings.pidfile.read_text().splitlines()
        if changed == "start":
            server = f"{foreign.pid} 1"
        space = "of an earlier boot" if changed == "boot" else space
        settings.pidfile.write_text("\n".join([wrapper, server] if changed == "none" else [wrapper, server, space]))
        end_leftover_engines(settings)
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"is_attached": True}, False),
        ({"args": ("--worker-extension-cls", "mine.Extension")}, False),
        ({"args": ("--worker-extension-cls=mine.Extension",)}, False),
    ],
)
def test_only_workers_with_our_extension_are_asked_to_check_files(
    tmp_path: Path, changed: dict[str, Any], expected: bool
) -> None:
    """A method that they do not have would put the workers of one vLLM out of step."""
    values: dict[str, Any] = {
        "model_path": tmp_path,
        "port": 1,
        "database_url": "",
        "state_dir": tmp_path,
        "policies_root": tmp_path,
    }
    settings = EngineSettings(**(values | changed))
    assert settings.checks_files is expected
    assert WORKER_EXTENSION in vllm_command(settings, tmp_path)


@pytest.mark.parametrize(
    ("ours", "of_the_config", "expected"),
    [
        (None, {}, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", {}, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        (None, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3"}, "glibc.malloc.arena_max=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=1", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_vllm_starts_with_huge_pages_unless_the_user_refuses_them(
    ours: str | None,
    of_the_config: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ours is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", ours)
    if "GLIBC_TUNABLES" not in start_variables({}):
        pytest.skip("this machine's C library has no such tunable")
    settings = EngineSettings(
        model_path=tmp_path,
        port=1,
        database_url="unused",
        state_dir=tmp_path,
        policies_root=tmp_path,
        environment=of_the_config,
    )
    assert vllm_environment(settings)["GLIBC_TUNABLES"] == expected


@pytest.mark.parametrize("given", [{}, {"num_threads": 3}, {"kv_cache_gib": 1, "num_threads": 1}])
def test_vllm_keeps_its_own_memory_and_threads_unless_they_are_given(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"kv_cache_gib": "VLLM_CPU_KVCACHE_SPACE", "num_threads": "OMP_NUM_THREADS"}
    for name in names.values():
        monkeypatch.delenv(name, raising=False)
    place = {"model_path": tmp_path, "port": 1, "database_url": "", "state_dir": tmp_path, "policies_root": tmp_path}
    found = vllm_environment(EngineSettings(**place, **given))
    assert {name: found[variable] for name, variable in names.items() if variable in found} == {
        name: str(value) for name, value in given.items()
    }
