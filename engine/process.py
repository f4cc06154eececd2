"""Run vLLM as a process of this machine: its command line and environment, and its end.

vLLM starts processes of its own. All of them end with the wrapper, and no process of another engine is ended: they are
found by a marker in their environment.
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

from pydantic import Field

from engine import adapter_files
from engine.vllm_plugin import BACKEND, WORKER_EXTENSION
from ratchet import tracing
from ratchet.config_engines import DEFAULT_SET
from ratchet.config_sections import EngineConfig
from ratchet.errors import MachineError
from ratchet.lora_slots import FIRST_SLOT, SERVED_RANKS, served_rank, slot_name
from ratchet.start_variables import start_variables

STOP_SECONDS = 10.0
_MARKER = "RATCHET_ENGINE_PIDFILE"
"""Environment variable of all processes of one vLLM, inherited by those that it starts; its value is the pidfile."""


class EngineSettings(EngineConfig):
    """Settings of one engine: those of its set's config, and its place. `args`: with its own; they override what is set
    here. `kv_cache_gib`, `num_threads`: vLLM decides unless given; a GPU needs `--gpu-memory-utilization` instead."""

    model_path: Path
    """The model that is served while no open run has published a policy."""
    port: int
    """TCP port that vLLM listens on."""
    database_url: str
    """URL of the Postgres database, in which the engine is registered."""
    state_dir: Path
    """Directory of the pidfile."""
    engine_set: str = DEFAULT_SET
    """The set that the engine belongs to: it loads the versions of runs of this set, and answers their calls only."""
    policies_root: Path
    """The directory below which every published policy lies; weight updates from other directories are refused."""
    host: str = "127.0.0.1"
    """Address that vLLM listens on and that the adapter connects to.

    vLLM's weight routes have no password, so it must be the loopback address or one of a private network.
    """
    max_model_len: int | None = None
    """Highest number of tokens of prompt and output of one call; None takes it from the model's configuration."""
    lora_rank: int | None = None
    """Highest rank of the LoRA adapters that are served with the model; None serves no adapter."""
    router_replay: bool = False
    """True if vLLM returns the experts that it chose for each token."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of vLLM, such as CUDA_VISIBLE_DEVICES."""
    is_attached: bool = False
    """True if vLLM already runs, so that it is only registered and given weights, and neither started nor stopped."""

    @property
    def checks_files(self) -> bool:
        """True if vLLM has our worker extension: it is started here, and its arguments name no other extension."""
        return not self.is_attached and not any("worker-extension-cls" in one for one in self.args)

    @property
    def address(self) -> str:
        """The engine's URL, under which it is registered."""
        return f"http://{self.host}:{self.port}"

    @property
    def pidfile(self) -> Path:
        """The file with the pids of the wrapper and of vLLM."""
        return self.state_dir / f"engine-{self.port}.pid"

    @property
    def sockets(self) -> Path:
        """The directory of the sockets of vLLM's own processes, which also holds the adapter that is served and what a
        killed vLLM leaves.

        Its path is short, since a socket's path has at most 107 bytes.
        """
        digest = hashlib.sha256(bytes(self.pidfile.resolve())).hexdigest()
        return Path(tempfile.gettempdir()) / f"ratchet-engine-{digest[:12]}"

    @property
    def adapter(self) -> Path | None:
        """The directory from which vLLM reads the adapter of the first slot; None if it serves none."""
        return None if self.lora_rank is None else self.sockets / "adapter"

    @property
    def slots(self) -> range:
        """The LoRA slots; an engine without LoRA has one, in which the model itself is."""
        return range(FIRST_SLOT, FIRST_SLOT + (1 if self.lora_rank is None else self.lora_runs))


def vllm_command(settings: EngineSettings, model: Path) -> list[str]:
    """Return vLLM's command line.

    The `vllm` console script is not used: it fails on the CPU build, which has the metadata of another distribution.
    """
    arguments = ["--model", str(model), *_names(settings)]
    arguments += ["--host", settings.host, "--port", str(settings.port)]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--dtype", settings.dtype]
    arguments += ["--weight-transfer-config", f'{{"backend":"{BACKEND}"}}', "--worker-extension-cls", WORKER_EXTENSION]
    arguments += ["--disable-uvicorn-access-log", "--max-num-seqs", str(settings.max_num_seqs)]
    if settings.max_model_len is not None:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    if settings.router_replay:
        arguments += ["--enable-return-routed-experts"]
    if (collector := tracing.collector_url()) is not None:
        arguments += ["--otlp-traces-endpoint", collector]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments, *settings.args]


def _names(settings: EngineSettings) -> list[str]:
    """Return the arguments that name what is served: calls name a slot, with an adapter or without."""
    if settings.lora_rank is None or settings.adapter is None:
        return ["--served-model-name", slot_name(FIRST_SLOT)]
    rank = served_rank(settings.lora_rank)
    modules = [f"{slot_name(one)}={adapter_files.slot_directory(settings.adapter, one)}" for one in settings.slots]
    return [
        *("--served-model-name", adapter_files.BASE_NAME, "--enable-lora", "--max-lora-rank", str(rank)),
        *("--max-loras", str(len(settings.slots)), "--lora-modules", *modules),
    ]


def vllm_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment of vLLM: this process's, with the settings' variables."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # mounts pause, resume and the weight routes
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_RPC_BASE_PATH": str(settings.sockets),
        _MARKER: str(settings.pidfile.resolve()),
    }
    if tracing.collector_url() is not None:  # vLLM's own default is gRPC
        values["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = tracing.collector_protocol()
        values["OTEL_SERVICE_NAME"] = os.environ.get("OTEL_SERVICE_NAME") or "ratchet-engine"
    for name, variable in (("kv_cache_gib", "VLLM_CPU_KVCACHE_SPACE"), ("num_threads", "OMP_NUM_THREADS")):
        if name in settings.model_fields_set:
            values[variable] = str(getattr(settings, name))
    environment = os.environ | values | settings.environment
    return environment | start_variables(environment)


@contextlib.asynccontextmanager
async def vllm_process(settings: EngineSettings, model: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run vLLM during the block; none of its processes is left afterwards."""
    shutil.rmtree(settings.sockets, ignore_errors=True)
    settings.sockets.mkdir(mode=0o700)
    if settings.adapter is not None:
        for slot in settings.slots:
            directory = adapter_files.slot_directory(settings.adapter, slot)
            adapter_files.write_identity_adapter(directory, SERVED_RANKS[0])
    process = await asyncio.create_subprocess_exec(
        *vllm_command(settings, model),
        env=vllm_environment(settings),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    _write_pidfile(settings.pidfile, process.pid)
    try:
        yield process
    finally:
        await _end_group(process, settings)


def die_with_parent() -> None:
    """Make Linux kill this child when the wrapper dies, also by SIGKILL. Runs in the child, before exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def port_taken(host: str, port: int) -> bool:
    """Return whether the port cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _write_pidfile(pidfile: Path, server_pid: int) -> None:
    """Write a line for the wrapper and one for vLLM: pid and kernel start time, since a pid may be used again.

    A third one says which machine or container counts these pids, and since which boot.
    """
    pidfile.parent.mkdir(parents=True, exist_ok=True)
    lines = [*(f"{pid} {_start_time(pid)}" for pid in (os.getpid(), server_pid)), _pid_space()]
    pidfile.write_text("".join(f"{line}\n" for line in lines))


def end_leftover_engines(settings: EngineSettings) -> None:
    """Kill the processes that a killed wrapper left: those of its vLLM's session.

    If the pids may have been given to others since, only processes with this engine's marker. Raises MachineError if
    the recorded wrapper is still alive.
    """
    try:
        lines = settings.pidfile.read_text().splitlines()
        (wrapper, started), (server, server_started) = (line.split() for line in lines[:2])
    except (OSError, ValueError):
        return
    if int(wrapper) != os.getpid() and _start_time(int(wrapper)) == int(started):
        what = f"an engine with pidfile {settings.pidfile} already runs (pid {wrapper})"
        raise MachineError(f"{what}; end it or choose another engine port")
    # A session's number is not used again while one of its processes lives, so a dead leader's session is ours.
    is_ours = lines[2:] == [_pid_space()] and str(_start_time(int(server))) in (server_started, "None")
    while members := session_members(int(server), settings, by_program=is_ours):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _remove_files(settings)


async def _end_group(process: asyncio.subprocess.Process, settings: EngineSettings) -> None:
    """Send SIGTERM to all processes of vLLM, and SIGKILL to those that are left after STOP_SECONDS."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while session_members(process.pid, settings) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for pid in session_members(process.pid, settings):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
    _remove_files(settings)


def _remove_files(settings: EngineSettings) -> None:
    settings.pidfile.unlink(missing_ok=True)
    shutil.rmtree(settings.sockets, ignore_errors=True)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from `state` on; empty if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _pid_space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def session_members(session: int, settings: EngineSettings, by_program: bool = True) -> list[int]:
    """Return the pids of a session's processes that have this engine's marker or, `by_program`, run this Python.

    vLLM's engine core sets its title, which overwrites its environment. If it hangs, it outlives the server and holds
    its GPU. Use `by_program` only for a session that is known to be this engine's.
    """
    mark = f"{_MARKER}={settings.pidfile.resolve()}".encode()
    python = os.path.realpath(sys.executable)
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and int(fields[3]) == session:
            with contextlib.suppress(OSError):
                is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
                if is_marked or (by_program and os.readlink(entry / "exe") == python):
                    members.append(int(entry.name))
    return members
