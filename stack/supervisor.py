"""Start, watch and stop the local stack through supervisord; this module renders its config and calls its API."""

import contextlib
import fcntl
import os
import shlex
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from supervisor.xmlrpc import SupervisorTransport

from ratchet.errors import MachineError
from ratchet.start_variables import start_variables
from stack.part_health import health_path, health_written_at
from stack.parts import WATCHER, Part, Stack
from stack.ports import MARK, has_mark

_STOPPED_LAST = ("postgres", "temporal", "temporal-ui")
"""The other parts write to these while they stop."""

_SILENT_WATCHER_SECONDS = 60.0
_START_SECONDS = 300.0

_LOOPBACK = ("127.0.0.1", "localhost")

_PROGRAM = """
[program:{name}]
command={command}
priority={priority}
directory={directory}
autorestart=true
startretries=1000000
startsecs=2
stopsignal={stop_signal}
stopasgroup={group}
killasgroup={group}
stopwaitsecs={stop_wait}
stdout_logfile={logs}/{name}.log
stdout_logfile_maxbytes=20MB
stdout_logfile_backups=2
redirect_stderr=true
"""

_HEAD = """
[supervisord]
logfile={home}/logs/supervisord.log
pidfile={home}/supervisord.pid
childlogdir={home}/logs
nodaemon=false
minfds=4096
environment={environment}

[unix_http_server]
file={home}/supervisor.sock
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{home}/supervisor.sock
"""


@dataclass(slots=True, frozen=True)
class PartState:
    """One part as supervisord reports it. `state` is supervisord's word in lower case. `started_at`: when its newest
    process was started, also one that has ended, in seconds since the epoch; 0 if none was. `uptime_seconds` is 0
    unless it runs."""

    name: str
    state: str
    pid: int | None
    started_at: float
    uptime_seconds: float
    detail: str


def _quote(value: str) -> str:
    """Quote a value for supervisord's `environment=` and `command=`, with % doubled."""
    return '"' + value.replace("%", "%%").replace('"', '\\"') + '"'


def _render(stack: Stack) -> str:
    """Render the whole config. Every part's working directory is the checkout's root."""
    variables = {**stack.environment(), MARK: str(stack.home), "PYTHONUNBUFFERED": "1"}
    # Loopback last and once: a provider of this process may have added it, and another text restarts every part.
    hosts = [host for host in (os.environ.get("NO_PROXY") or "").split(",") if host and host not in _LOOPBACK]
    no_proxy = ",".join([*hosts, *_LOOPBACK])
    variables |= {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
    environment = ",".join(f"{name}={_quote(value)}" for name, value in variables.items())
    text = _HEAD.format(home=stack.home, environment=environment)
    return text + "".join(_program(stack, part) for part in stack.parts())


def _program(stack: Stack, part: Part) -> str:
    return _PROGRAM.format(
        name=part.name,
        command=shlex.join(part.command).replace("%", "%%"),
        priority=part.priority,
        directory=Path.cwd(),
        stop_signal=part.stop_signal,
        group=str(part.stop_group).lower(),
        stop_wait=part.stop_wait_seconds,
        logs=stack.home / "logs",
    )


class Supervisor:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.config_path = stack.home / "supervisord.conf"

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call one method of supervisord over its socket. Raises MachineError if supervisord is suspended."""
        self._require_running()
        transport = SupervisorTransport(None, None, f"unix://{self.stack.home}/supervisor.sock")
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def _require_running(self) -> None:
        """Raise MachineError if supervisord's process is stopped: a call of it would wait for ever."""
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            pid = int((self.stack.home / "supervisord.pid").read_text())
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED and str(self.config_path) in process.cmdline():
                raise MachineError(f"supervisord (process {pid}) is suspended; `kill -CONT {pid}` resumes it")

    def is_up(self) -> bool:
        try:
            return bool(self._ask("getState")["statename"] == "RUNNING")
        except (OSError, xmlrpc.client.Error, ConnectionError):
            return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other `up` or `down` of this stack changes it: each would end what the other one has begun."""
        (self.stack.home / "logs").mkdir(parents=True, exist_ok=True)
        with (self.stack.home / "supervisor.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def up(self) -> None:
        """Start what is stopped and restart parts whose command has changed; leave other parts alone. Idempotent."""
        with self._alone():
            if self.is_up():
                self.stack.refresh_ports()  # another command may have recorded some since
                self.stack.record_ports()
                self._write_config()
                self._reload()
                self._start_stopped()
                self._restart_silent_watcher()
                return
            end_leftover_processes(self.stack.home)
            health_path(self.stack.home).unlink(missing_ok=True)  # the states of parts that have ended
            self.stack.keep_ports()
            self._write_config()
            command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(self.config_path)]
            # With the mark it is found and ended even if its socket is gone, or it would start again what is ended.
            marked = {**os.environ, **start_variables(os.environ), MARK: str(self.stack.home)}
            started = subprocess.run(command, capture_output=True, text=True, check=False, env=marked)
            deadline = time.monotonic() + _START_SECONDS
            while not self.is_up():
                if started.returncode != 0 or time.monotonic() > deadline:
                    raise MachineError(
                        f"supervisord did not start: {(started.stderr or started.stdout).strip()[-300:]}"
                    )
                time.sleep(0.1)

    def _write_config(self) -> None:
        self.config_path.write_text(_render(self.stack))
        self.config_path.chmod(0o600)

    def _reload(self) -> None:
        added, changed, removed = self._ask("reloadConfig")[0]
        for name in [*changed, *removed]:
            self._ask("stopProcessGroup", name)
            self._ask("removeProcessGroup", name)
        for name in [*added, *changed]:
            self._ask("addProcessGroup", name)

    def _start_stopped(self) -> None:
        """Start parts that an interrupted `up` or a user has stopped; a part that is still stopping cannot start."""
        while any(part.state == "stopping" for part in self.states()):
            time.sleep(0.1)
        for part in self.states():
            if part.state in ("stopped", "exited", "fatal"):
                self.start(part.name)

    def _restart_silent_watcher(self) -> None:
        """Restart a watcher that has written nothing for a minute, since nothing watches it."""
        written_at = health_written_at(self.stack.home)
        silent = written_at is not None and time.time() - written_at > _SILENT_WATCHER_SECONDS
        uptime_seconds = {part.name: part.uptime_seconds for part in self.states()}
        if silent and uptime_seconds.get(WATCHER, 0.0) > _SILENT_WATCHER_SECONDS:
            self.stop(WATCHER)
            self.start(WATCHER)

    def stop(self, *names: str, wait: bool = True) -> None:
        """Stop parts, which stay down until the next `up`. `wait`: until each has ended."""
        for name in names:
            with contextlib.suppress(xmlrpc.client.Fault):
                self._ask("stopProcess", name, wait)

    def start(self, name: str) -> None:
        """Start one part that was stopped; return before it answers."""
        with contextlib.suppress(xmlrpc.client.Fault):  # it has just been started
            self._ask("startProcess", name, False)

    def down(self) -> None:
        """Stop every part, Postgres and Temporal last, then supervisord. Boxes run on until their TTL."""
        if not self.stack.home.is_dir():
            return
        with self._alone():
            if self.is_up():
                pid = int(self._ask("getPID"))
                for part in self.stack.parts():
                    if part.name not in _STOPPED_LAST:
                        self.stop(part.name, wait=False)
                self._ask("shutdown")
                with contextlib.suppress(psutil.Error):  # one that takes longer is ended with what is left
                    psutil.Process(pid).wait(timeout=_START_SECONDS)
            end_leftover_processes(self.stack.home)

    def states(self) -> list[PartState]:
        """Return every part in start order."""
        found = self.known_states()
        if found is None:  # while it shuts down it refuses questions, then it is gone
            word = "stopping" if self.is_up() else "stopped"
            return [PartState(part.name, word, None, 0.0, 0.0, "") for part in self.stack.parts()]
        return found

    def known_states(self) -> list[PartState] | None:
        """Return what `states` returns with one question to supervisord; None if it does not answer."""
        try:
            infos = self._ask("getAllProcessInfo")
        except (xmlrpc.client.Error, OSError):
            return None
        order = [part.name for part in self.stack.parts()]
        infos.sort(key=lambda info: order.index(info["name"]) if info["name"] in order else len(order))
        return [
            PartState(
                info["name"],
                info["statename"].lower(),
                info["pid"] or None,
                float(info["start"]),
                float(info["now"] - info["start"]) if info["statename"] == "RUNNING" else 0.0,
                info["spawnerr"],
            )
            for info in infos
        ]


def _marked(home: Path) -> list[psutil.Process]:
    """Return the living processes of this stack except boxes and this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.pid != os.getpid() and has_mark(process, home)
            if ours and "boxd" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def end_leftover_processes(home: Path) -> None:
    """End what a killed supervisord left behind: SIGTERM first, then SIGKILL."""
    leftovers = _marked(home)
    for process in leftovers:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(leftovers, timeout=20)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
    for name in ("supervisor.sock", "supervisord.pid"):
        (home / name).unlink(missing_ok=True)
