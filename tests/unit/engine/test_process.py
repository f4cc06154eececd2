"""A vLLM that was killed leaves no process behind, also if one of them is suspended and has set its title."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.process import EngineSettings, end_leftover_engines, session_members, vllm_environment

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
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=vllm_environment(settings),
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
        settings.pidfile.write_text(f"{os.getpid()} 1\n{server.pid} 1\n")
        os.kill(core, signal.SIGSTOP)
        server.kill()
        server.wait()
        end_leftover_engines(settings)
        assert session_members(server.pid, settings) == []
        assert Path(f"/proc/{other}").exists(), "a process that is not the engine's was ended"
    finally:
        os.kill(other, signal.SIGKILL)
        server.stdout.close()
