"""One process of a launch on one host, for as long as this process lives: here as a child, elsewhere over ssh.

It ends when its input ends: that is when this process ends it, when this process dies, and when the connection is lost.
No other process of a host is touched, so several launches can share one.
"""

import contextlib
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ratchet.errors import MachineError
from stack.cluster import Cluster

_END_SECONDS, _AGAIN_SECONDS = 60.0, 5.0
_START_SECONDS = 300.0
"""Time without a word of a process that starts, after which it is given up."""
_LOOK_SECONDS, _SAY_SECONDS = 1.0, 15.0
_SCRIPT = """
exec 3<&0
while IFS= read -r line <&3 && [ -n "$line" ]; do export "$line"; done
cd {directory} || exit 1
setsid env {variables} {command} </dev/null &
process=$!
setsid sh -c 'cat; kill -TERM $0; sleep {patience}; kill -KILL -$0' $process <&3 >/dev/null 2>&1 &
guard=$!
wait $process
status=$?
kill -KILL -$process 2>/dev/null
kill -KILL $guard -$guard 2>/dev/null
exit $status
"""
"""Takes NAME=VALUE lines up to an empty one, because arguments can be read by every user of a host; runs the command in
a process group of its own, and ends that group when the script's input ends."""
_PATIENCE_SECONDS = 20
Say = Callable[[str], None]
LogLine = Callable[[str, str], None]  # of the name of a part and a line that it has printed


class HostProcess:
    """A process on the host that is started again, after a pause, if it ends by itself.

    `name`: for messages. `started`: a text in its output that says that it is up. `environment`: variables that no
    command line shows. `log`: gets each line of its output.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        say: Say,
        started: str = "",
        environment: Mapping[str, str] | None = None,
        log: Say = lambda line: None,
    ) -> None:
        self.name = name
        self.command = command
        self.say = say
        self.started = started
        self.environment = environment or {}
        self.log = log
        self.is_ending = False
        self.is_up = threading.Event()
        self.has_ended = False
        self.began_at = self.heard_at = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=5)
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()
        self.keeper = threading.Thread(target=self._keep, name=name, daemon=True)
        self.keeper.start()

    def _keep(self) -> None:
        before: tuple[int, str] | None = None
        while True:
            with self.lock:
                if self.is_ending:
                    return
                self.process = self._start()
            assert self.process.stdin is not None and self.process.stdout is not None
            with self.process.stdout:
                self._read(self.process.stdout)
            status = self.process.wait()
            self.has_ended = True
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self.is_up.clear()
            if not self.is_ending:
                end = (status, "".join([*self.last_lines][-1:]))
                if end != before:  # a host may be away for hours
                    self.say(f"{self.name} has ended with status {status}: {self.words()}; starting again")
                before = end
                time.sleep(_AGAIN_SECONDS)

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended at once; its output says why
            process.stdin.write("".join(f"{name}={value}\n" for name, value in self.environment.items()) + "\n")
            process.stdin.flush()
        return process

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.heard_at = time.monotonic()
            if line.strip():
                self.log(line.rstrip())
                self.last_lines.append(line.strip())
            if self.started and self.started in line:
                self.is_up.set()

    def words(self) -> str:
        """Return what it has said last."""
        return "; ".join(self.last_lines)[-300:] or "it said nothing"

    def end(self) -> None:
        """Close its input, without waiting for its end."""
        with self.lock:
            self.is_ending = True
            if self.process is not None and self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()

    def wait_ended(self) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # the host does not answer; its guard ends the process once it notices
            self.process.kill()
        self.keeper.join()


def wait_up(processes: Sequence[HostProcess], say: Say) -> None:
    """Wait while processes go on with their start. One that has ended since and starts again does not go on. Raises
    MachineError, naming the process and what it said, if one does not come up."""
    said_at = time.monotonic()
    for one in processes:
        while not one.is_up.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - (one.began_at if one.has_ended else one.heard_at) > _START_SECONDS:
                raise MachineError(
                    f"{one.name} was not up within {_START_SECONDS:.0f} s: {one.words()}; try "
                    f"`{shlex.join(one.command[:-1])}`, and see that the checkout and its .venv are there"
                )
            if now - said_at > _SAY_SECONDS:
                said_at = now
                say(f"waiting for {one.name}: {one.words()}")


def end_all(processes: Sequence[HostProcess]) -> None:
    """End the processes, the newest first, and wait for their ends."""
    for one in reversed(processes):
        one.end()
    for one in reversed(processes):
        one.wait_ended()


def here(cluster: Cluster, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command that runs another one on this machine, in the cluster's directory."""
    return ["sh", "-c", _script(cluster, command, variables)]


def over_ssh(
    cluster: Cluster, host: str, command: Sequence[str], variables: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """Return a command that runs another on a host. `options`: of the connection. `variables`: not secret."""
    return [*ssh_login(cluster, host, options), f"sh -c {shlex.quote(_script(cluster, command, variables))}"]


def ssh_login(cluster: Cluster, host: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that connects to a host, without the command to run there."""
    login = f"{cluster.user}@{host}" if cluster.user else host
    # Without BatchMode, ssh would ask for a password.
    return ["ssh", "-o", "BatchMode=yes", *options, *cluster.ssh, login]


def _script(cluster: Cluster, command: Sequence[str], variables: Mapping[str, str]) -> str:
    return _SCRIPT.format(
        directory=shlex.quote(str(cluster.directory)),
        variables=shlex.join(f"{name}={value}" for name, value in variables.items()),
        command=shlex.join(command),
        patience=_PATIENCE_SECONDS,
    )
