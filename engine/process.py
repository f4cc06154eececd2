"""vLLM as a process of this machine: its command line, its environment, and that none outlives us and none of others is ended.

Why here: whoever reads how an engine is kept honest need not read how a process group is found and ended.
Called by: `engine.py`.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from engine.vllm_plugin import BACKEND
from ratchet.errors import MachineError

STOP_SECONDS = 10.0
_MARKER = "RATCHET_ENGINE_PIDFILE"
"""In the environment of every process of this vLLM, whatever it forks, so that it is known as ours."""


class EngineSettings(BaseModel):
    """What `ratchet engine` needs. `extra_args` go to vLLM as they stand and win over ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: Path
    """The model to serve while no open run has published a policy."""
    port: int
    database_url: str
    state_dir: Path
    """Where the pidfile lies."""
    policies_root: Path
    """The directory below which every published policy lies; weight updates from elsewhere are refused."""
    host: str = "127.0.0.1"
    """Address that vLLM listens on and that the adapter connects to. Its weight routes know no password: loopback or a private network."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and output of one call; None leaves it to the model's own configuration."""
    max_num_seqs: int = 64
    kv_cache_gib: int | None = None
    """Memory for the KV cache on a CPU, in GiB; None leaves it to vLLM. A GPU is told by `--gpu-memory-utilization` in extra_args."""
    num_threads: int | None = None
    """Compute threads on a CPU; None leaves it to vLLM."""
    extra_args: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pidfile(self) -> Path:
        return self.state_dir / f"engine-{self.port}.pid"

    @property
    def sockets(self) -> Path:
        """Where vLLM's own processes meet; short, because a socket's path has at most 107 bytes. What a killed vLLM leaves lies here."""
        return (
            Path(tempfile.gettempdir())
            / f"ratchet-engine-{hashlib.sha256(bytes(self.pidfile.resolve())).hexdigest()[:12]}"
        )


def vllm_command(settings: EngineSettings, model: Path) -> list[str]:
    """vLLM's command line. (The `vllm` console script fails on the CPU build: it looks for another distribution's metadata.)"""
    arguments = [
        "--model",
        str(model),
        "--served-model-name",
        "policy",
        "--host",
        settings.host,
        "--port",
        str(settings.port),
    ]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--dtype", settings.dtype]
    arguments += [
        "--max-num-seqs",
        str(settings.max_num_seqs),
        "--weight-transfer-config",
        f'{{"backend":"{BACKEND}"}}',
    ]
    arguments += ["--disable-uvicorn-access-log"]
    if settings.max_model_len is not None:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *settings.extra_args]


def vllm_environment(settings: EngineSettings) -> dict[str, str]:
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # mounts pause, resume and the weight routes
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_RPC_BASE_PATH": str(settings.sockets),
        _MARKER: str(settings.pidfile.resolve()),
    }
    if settings.kv_cache_gib is not None:
        values["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    if settings.num_threads is not None:
        values["OMP_NUM_THREADS"] = str(settings.num_threads)
    return os.environ | values


@contextlib.asynccontextmanager
async def vllm_process(settings: EngineSettings, model: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """vLLM for as long as the block runs, and nothing of it afterwards."""
    shutil.rmtree(settings.sockets, ignore_errors=True)
    settings.sockets.mkdir(mode=0o700)
    process = await asyncio.create_subprocess_exec(
        *vllm_command(settings, model),
        env=vllm_environment(settings),
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    _write_pidfile(settings.pidfile, process.pid)
    try:
        yield process
    finally:
        await _end_group(process, settings)


def _die_with_parent() -> None:
    """In the child: Linux kills it when the wrapper dies, be it by SIGKILL."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def port_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _write_pidfile(pidfile: Path, server_pid: int) -> None:
    """Line 1: wrapper, line 2: vLLM, each as pid and kernel start time (a pid alone may be another's by now)."""
    pidfile.parent.mkdir(parents=True, exist_ok=True)
    pidfile.write_text("".join(f"{pid} {_start_time(pid)}\n" for pid in (os.getpid(), server_pid)))


def end_leftover_engines(settings: EngineSettings) -> None:
    """Kills what a killed wrapper left behind: the members of its vLLM's session that carry our marker.

    Raises MachineError where the recorded wrapper still lives.
    """
    try:
        (wrapper, started), (server, _) = (line.split() for line in settings.pidfile.read_text().splitlines())
    except (OSError, ValueError):
        return
    if int(wrapper) != os.getpid() and _start_time(int(wrapper)) == int(started):
        raise MachineError(
            f"an engine with pidfile {settings.pidfile} already runs (pid {wrapper}); end it or choose another engine port"
        )
    while members := session_members(int(server), settings):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _forget(settings)


async def _end_group(process: asyncio.subprocess.Process, settings: EngineSettings) -> None:
    """SIGTERM to all of vLLM, SIGKILL to what is left after some seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while session_members(process.pid, settings) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for pid in session_members(process.pid, settings):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
    _forget(settings)


def _forget(settings: EngineSettings) -> None:
    settings.pidfile.unlink(missing_ok=True)
    shutil.rmtree(settings.sockets, ignore_errors=True)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from `state` on; empty where there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def session_members(session: int, settings: EngineSettings) -> list[int]:
    """Processes of a session that carry this engine's marker."""
    mark = f"{_MARKER}={settings.pidfile.resolve()}".encode()
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and int(fields[3]) == session:
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    members.append(int(entry.name))
    return members
