"""Run one Ray node per host of a cluster for as long as this process lives: here as a child, elsewhere over ssh."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial

from ratchet.config_engines import LOCAL
from ratchet.start_variables import start_variables
from stack.cluster import Cluster
from stack.gpus import visible_devices
from stack.host_process import HostProcess, LogLine, Say, end_all, here, over_ssh, wait_up
from stack.placement import Placement
from stack.ports import free_port

_STARTED = "Ray runtime started"
RAY_VARIABLES = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else Ray makes an environment per `uv run`
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # a busy laptop imports torch slowly
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's 15 a rank waits until every box of the next step has had its CPU time
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every Ray node, here and on other hosts."""
# A lost connection is noticed after 45 s; the other end's node ends by itself then, since Ray's head counts it as dead.
_OPTIONS = ("-o", "ServerAliveInterval=15")


@contextlib.contextmanager
def ray_nodes(cluster: Cluster, placement: Placement, say: Say, log: LogLine) -> Iterator[None]:
    """Run the head here and a node on every host with a part of the run; all of them have ended after the block.

    `log` gets each line that a node prints, with the node's name.
    Raises MachineError, naming the host and what it said, if one does not come up.
    """
    nodes: list[HostProcess] = []

    def start(host: str) -> None:
        command, lines = node_command(cluster, placement, host), partial(log, f"ray {host}")
        nodes.append(HostProcess(f"the Ray node of {host}", command, say, started=_STARTED, log=lines))

    try:
        start(LOCAL)
        wait_up(nodes, say)
        for host in cluster.ray_hosts:
            start(host)
        wait_up(nodes, say)
        say(f"Ray is up at {cluster.ray_address} with {len(nodes)} nodes")
        yield
    finally:
        end_all(nodes)


def node_command(cluster: Cluster, placement: Placement, host: str) -> list[str]:
    """Return the command that runs the node of a host, which offers the learner's GPUs to Ray and no others."""
    gpus = placement.learner.get(host, ())
    is_head = host == LOCAL
    variables = RAY_VARIABLES | start_variables(os.environ) | placement.rank_variables
    arguments = [str(cluster.directory / ".venv/bin/ray"), "start", "--block", "--disable-usage-stats"]
    arguments += [f"--node-ip-address={cluster.head if is_head else host}", f"--num-gpus={len(gpus)}"]
    arguments += ["--min-worker-port=0", "--max-worker-port=0"]
    if not is_head:
        variables |= visible_devices(gpus, is_here=False)
        return over_ssh(cluster, host, [*arguments, f"--address={cluster.ray_address}"], variables, _OPTIONS)
    arguments += ["--head", f"--port={cluster.port}", "--include-dashboard=false"]
    # Of its own, so that another cluster of this machine is not taken for this one.
    arguments += [
        f"--temp-dir=/tmp/ratchet-ray-{os.getuid()}-{cluster.port}",
        f"--ray-client-server-port={free_port()}",
    ]
    return here(cluster, arguments, variables | visible_devices(gpus))
