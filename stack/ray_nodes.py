"""Run one Ray node per host of a cluster for as long as this process lives: here as a child, elsewhere over ssh.

A node ends when its input ends: that is when this process ends it, when this process dies, and when the connection is
lost. No other process of a host is touched, so several clusters can share one.
"""

import contextlib
import os
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

from ratchet.config_engines import LOCAL
from ratchet.errors import MachineError
from stack.cluster import Cluster
from stack.gpus import usable_gpus, visible_devices
from stack.placement import Placement
from stack.ports import free_port

_START_SECONDS, _END_SECONDS, _AGAIN_SECONDS = 300.0, 60.0, 5.0
_STARTED = "Ray runtime started"
_VARIABLES = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "PYTHONUNBUFFERED": "1",
}
_SCRIPT = """
exec 3<&0
cd {directory} || exit 1
setsid env {variables} {command} </dev/null &
node=$!
(cat <&3 >/dev/null 2>&1; kill -TERM $node; sleep {patience}; kill -KILL -- -$node) >/dev/null 2>&1 &
guard=$!
wait $node
status=$?
kill -KILL -- -$node 2>/dev/null
kill $guard 2>/dev/null
exit $status
"""
"""Runs the node in a process group of its own, and ends that group when the script's input ends."""
_PATIENCE_SECONDS = 20
Say = Callable[[str], None]


class RayNode:
    """The Ray node of one host. It is started again, after a pause, if it ends by itself."""

    def __init__(self, host: str, command: list[str], say: Say) -> None:
        self.host = host
        self.command = command
        self.say = say
        self.is_ending = False
        self.is_up = threading.Event()
        self.last_lines: deque[str] = deque(maxlen=5)
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()
        self.keeper = threading.Thread(target=self._keep, name=f"ray node {host}", daemon=True)
        self.keeper.start()

    def _keep(self) -> None:
        while True:
            with self.lock:
                if self.is_ending:
                    return
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the nodes in order
                )
            assert self.process.stdin is not None and self.process.stdout is not None
            with self.process.stdout:
                self._read(self.process.stdout)
            status = self.process.wait()
            self.process.stdin.close()
            self.is_up.clear()
            if not self.is_ending:
                self.say(f"the Ray node of {self.host} has ended with status {status}: {self.words()}; starting again")
                time.sleep(_AGAIN_SECONDS)

    def _read(self, output: IO[str]) -> None:
        for line in output:
            if line.strip():
                self.last_lines.append(line.strip())
            if _STARTED in line:
                self.is_up.set()

    def words(self) -> str:
        return "; ".join(self.last_lines)[-300:] or "it said nothing"

    def end(self) -> None:
        """Close the node's input, without waiting for its end."""
        with self.lock:
            self.is_ending = True
            if self.process is not None and self.process.stdin is not None:
                self.process.stdin.close()

    def wait_ended(self) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # the host does not answer; its guard ends the node once it notices
            self.process.kill()
        self.keeper.join()


@contextlib.contextmanager
def ray_nodes(cluster: Cluster, placement: Placement, say: Say) -> Iterator[None]:
    """Run the head here and a node on every host of the cluster; all of them have ended after the block.

    Raises MachineError, naming the host and what it said, if one does not come up.
    """
    nodes: list[RayNode] = []
    try:
        nodes.append(RayNode(LOCAL, node_command(cluster, placement, LOCAL), say))
        _wait_up(nodes)
        nodes += [RayNode(host, node_command(cluster, placement, host), say) for host in cluster.hosts]
        _wait_up(nodes)
        say(f"Ray is up at {cluster.ray_address} with {len(nodes)} nodes")
        yield
    finally:
        for node in reversed(nodes):
            node.end()
        for node in reversed(nodes):
            node.wait_ended()


def _wait_up(nodes: list[RayNode]) -> None:
    until = time.monotonic() + _START_SECONDS
    for node in nodes:
        if not node.is_up.wait(max(0.0, until - time.monotonic())):
            raise MachineError(
                f"the Ray node of {node.host} was not up within {_START_SECONDS:.0f} s: {node.words()}; try "
                f"`{shlex.join(node.command[:-1])}`, and see that the checkout and its .venv are there"
            )


def node_command(cluster: Cluster, placement: Placement, host: str) -> list[str]:
    """Return the command that runs the node of a host, which offers the learner's GPUs to Ray and no others."""
    gpus = placement.learner.get(host, ())
    here = host == LOCAL
    arguments = [str(cluster.directory / ".venv/bin/ray"), "start", "--block", "--disable-usage-stats"]
    arguments += [f"--node-ip-address={cluster.head if here else host}", f"--num-gpus={len(gpus)}"]
    arguments += ["--min-worker-port=0", "--max-worker-port=0"]
    if here:
        arguments += ["--head", f"--port={cluster.port}", "--include-dashboard=false"]
        # Of its own, so that another cluster of this machine is not taken for this one.
        arguments += [
            f"--temp-dir=/tmp/ratchet-ray-{os.getuid()}-{cluster.port}",
            f"--ray-client-server-port={free_port()}",
        ]
    else:
        arguments.append(f"--address={cluster.ray_address}")
    devices = visible_devices(gpus) if here and usable_gpus() else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    script = _SCRIPT.format(
        directory=shlex.quote(str(cluster.directory)),
        variables=shlex.join(f"{name}={value}" for name, value in (_VARIABLES | devices).items()),
        command=shlex.join(arguments),
        patience=_PATIENCE_SECONDS,
    )
    if here:
        return ["sh", "-c", script]
    login = f"{cluster.user}@{host}" if cluster.user else host
    # Without BatchMode, ssh would ask for a password; with the interval, this end notices a lost connection after 45 s.
    # The other end's node ends by itself then, since Ray's head counts it as dead.
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    return ["ssh", *options, *cluster.ssh, login, f"sh -c {shlex.quote(script)}"]
