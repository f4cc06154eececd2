"""Boxes on another host of a launch: the gateway and a worker run there, over ssh, which also joins the ports.

Every server stays on loopback: ssh forwards the gateway's port from here to there, and those of the adapter, Postgres
and Temporal from there to here. For the parts on this machine the boxes are those of a service at the gateway's port.
"""

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from functools import partial

import httpx

from ratchet.errors import ConfigError, MachineError
from ratchet.temporal_settings import QUEUES, QUEUES_VARIABLE
from stack.cluster import Cluster
from stack.host_process import HostProcess, LogLine, Say, over_ssh
from stack.parts import Stack

_START_SECONDS, _LOOK_SECONDS = 600.0, 0.5
_PREFIXES = ("ADAPTER_", "E2B_", "OTEL_", "RATCHET_", "SLIME_AGENT_", "SWE_", "TEMPORAL_", "VIME_AGENT_")
_QUEUES = ("boot", "agent", "grade", "image")
"""Of the worker beside the gateway. Only it builds images, since they are imported into that gateway's cache."""
# The connection and all that runs there live through an outage of ten minutes.
_OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=40", "-o", "ExitOnForwardFailure=yes")


@contextlib.contextmanager
def box_host(cluster: Cluster, stack: Stack, say: Say, log: LogLine) -> Iterator[None]:
    """Run gateway and worker on the cluster's host of boxes, if it has one, and make this process's environment name
    that gateway. They have ended after the block. `log` gets each line that they print, with their name.

    Raises ConfigError if the environment names other boxes, and MachineError if the gateway does not answer.
    """
    host = cluster.box_host
    if host is None:
        yield
        return
    if not stack.has_gateway:
        raise ConfigError(
            f"host {host} has `boxes: true`, but E2B_API_KEY or RATCHET_SANDBOX_PROVIDER names other boxes: unset the "
            "variable, or leave `boxes` out"
        )
    stack.keep_ports()
    os.environ |= _gateway_variables(stack)
    environment = carried_variables(os.environ) | stack.environment()
    processes: list[HostProcess] = []

    def start(part: str, forwards: list[str], *arguments: str) -> HostProcess:
        program = str(cluster.directory / ".venv/bin/ratchet")
        command = [program, "part", part, *arguments]
        ssh = over_ssh(cluster, host, command, {"PYTHONUNBUFFERED": "1"}, [*_OPTIONS, *forwards])
        lines = partial(log, f"{part} {host}")
        processes.append(HostProcess(f"the {part} of {host}", ssh, say, environment=environment, log=lines))
        return processes[-1]

    try:
        adapter_port = int(stack.environment()["ADAPTER_PORT"])
        gateway = start("gateway", ["-L", _same(stack.ports["gateway"]), "-R", _same(adapter_port)])
        _wait_answering(os.environ["E2B_API_URL"], gateway)
        start("worker", _service_ports(stack), *(f"--queue={queue}" for queue in _QUEUES))
        say(f"boxes and a worker are on {host}")
        yield
    finally:
        for process in processes:
            process.end()
        for process in processes:
            process.wait_ended()


def carried_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the gateway and the worker on the other host get, too."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES) and "\n" not in value}


def _gateway_variables(stack: Stack) -> dict[str, str]:
    url = f"http://127.0.0.1:{stack.ports['gateway']}"
    # Boxes call the adapter on their own loopback, as those of a gateway on this machine do.
    return {
        "E2B_API_KEY": stack.box_host_key(),
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "ADAPTER_PUBLIC_HOST": "127.0.0.1",
        QUEUES_VARIABLE: ",".join(queue for queue in QUEUES if queue != "image"),  # of the worker on this machine
    }


def _service_ports(stack: Stack) -> list[str]:
    """Forward the ports of those services that are parts of this stack; the host reaches others by their address."""
    own = {"RATCHET_DATABASE_URL": "postgres", "TEMPORAL_ADDRESS": "temporal"}
    ports = [stack.ports[name] for variable, name in own.items() if not stack.is_external(variable)]
    return [argument for port in ports for argument in ("-R", _same(port))]


def _same(port: int) -> str:
    return f"127.0.0.1:{port}:127.0.0.1:{port}"


def _wait_answering(url: str, gateway: HostProcess) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success:
                return
        if time.monotonic() > until:
            raise MachineError(
                f"{gateway.name} did not answer within {_START_SECONDS:.0f} s: {gateway.words()}; try "
                f"`{shlex.join(gateway.command[:-1])}`, and see that the checkout and its .venv are there"
            )
        time.sleep(_LOOK_SECONDS)
