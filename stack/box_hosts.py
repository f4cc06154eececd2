"""Boxes on other hosts of a launch: a gateway and a worker run on each, over ssh, and one front here serves all boxes.

Every server stays on loopback: ssh forwards each gateway's port from here to there, and those of the front, the
adapter, Postgres and Temporal from there to here. For all parts the boxes are those of a service at the front's port.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial

from ratchet.errors import ConfigError, MachineError
from ratchet.temporal_settings import QUEUES, QUEUES_VARIABLE
from stack.cluster import Cluster, read_cluster
from stack.host_process import HostProcess, LogLine, Say, end_all, here, over_ssh, wait_up
from stack.parts import BOX_HOSTS_FILE, Stack
from stack.ports import free_port

_READ_AGAIN_SECONDS = 5.0
_ALIVE_SECONDS, _UNBUFFERED = 15, {"PYTHONUNBUFFERED": "1"}
_OPTIONS = ("-o", f"ServerAliveInterval={_ALIVE_SECONDS}", "-o", "ExitOnForwardFailure=yes")
_PREFIXES = ("ADAPTER_", "E2B_", "OTEL_", "RATCHET_", "SLIME_AGENT_", "SWE_", "TEMPORAL_", "VIME_AGENT_", "XDG_CACHE_")
_QUEUES = ("boot", "agent", "grade", "image")
"""Of the worker beside a gateway. Only these build images, since they are imported into their gateway's cache."""


@contextlib.contextmanager
def box_hosts(cluster: Cluster, stack: Stack, say: Say, log: LogLine) -> Iterator[None]:
    """Run gateways and workers on the cluster's hosts of boxes, if it has some, and make this process's environment
    name their front. They have ended after the block. Hosts of boxes that the cluster's file gets later are added.
    `log` gets each line that the processes print, with their name.

    Raises ConfigError if the environment names other boxes, and MachineError if the front or no gateway comes up.
    """
    if not cluster.box_hosts:
        yield
        return
    if not stack.has_gateway:
        raise ConfigError(
            f"host {cluster.box_hosts[0]} has `boxes: true`, but E2B_API_KEY or RATCHET_SANDBOX_PROVIDER names other "
            "boxes: unset the variable, or leave `boxes` out"
        )
    stack.keep_ports()
    os.environ |= _front_variables(stack)
    hosts = _BoxHosts(cluster, stack, say, log)
    try:
        hosts.start()
        yield
    finally:
        hosts.end()


class _BoxHosts:
    """`gateways`: host → the process of its gateway. `ports`: host → its gateway's port here. `named`: the hosts that
    the file of the front names, which have been up once; while one does not answer, its rollouts are in an outage."""

    def __init__(self, cluster: Cluster, stack: Stack, say: Say, log: LogLine) -> None:
        self.cluster = cluster
        self.stack = stack
        self.say = say
        self.log = log
        self.environment = carried_variables(os.environ) | stack.environment()
        self.file = stack.home / BOX_HOSTS_FILE
        self.gateways: dict[str, HostProcess] = {}
        self.ports: dict[str, int] = {}
        self.named: list[str] = []
        self.processes: list[HostProcess] = []
        self.ended = threading.Event()
        self.follower = threading.Thread(target=self._follow, name="box hosts", daemon=True)

    def start(self) -> None:
        for host in self.cluster.box_hosts:
            self._add(host)
        for gateway in self.gateways.values():
            try:
                wait_up([gateway], self.say)
            except MachineError as error:
                self.say(f"{error}; until it is up, no box is made there, and images that only it has are unknown")
        self._name_those_up()
        if not self.named:
            raise MachineError(f"no host of boxes is up: {', '.join(self.gateways)}; the lines above say why")
        command = [sys.executable, "-P", "-m", "cli.main", "part", "gateway", "--front", str(self.file)]
        command.append(f"--lost-seconds={self.cluster.lost_seconds}")
        self._process("front", here(self.cluster, command, _UNBUFFERED), "host_of_boxes")
        wait_up(self.processes[-1:], self.say)
        self.follower.start()

    def _follow(self) -> None:
        """Add the hosts of boxes that the cluster's file has got since, until the end."""
        last = ""
        while not self.ended.wait(_READ_AGAIN_SECONDS):
            try:
                self._name_those_up()
                for host in read_cluster(self.cluster.source).box_hosts:
                    if host not in self.gateways:
                        self._add(host)
            except (ConfigError, OSError) as error:  # the file may be written just now, or the disk is full
                if str(error) != last:
                    self.log("front", f"no host is added: {error}")
                last = str(error)

    def end(self) -> None:
        self.ended.set()
        if self.follower.is_alive():
            self.follower.join()
        end_all(self.processes)

    def _add(self, host: str) -> None:
        """Start the gateway and the worker of a host."""
        self.ports[host] = free_port(self.stack.ports.values())
        forwards = ["-L", f"127.0.0.1:{self.ports[host]}:127.0.0.1:{self.stack.ports['gateway']}"]
        forwards += _back(int(self.environment["ADAPTER_PORT"]))
        self._over_ssh(host, "gateway", "boxes_adopted", forwards, f"--name={host}")
        self.gateways[host] = self.processes[-1]
        queues = [f"--queue={queue}" for queue in _QUEUES]
        self._over_ssh(host, "worker", "", _back(*_service_ports(self.stack)), *queues)

    def _over_ssh(self, host: str, part: str, started: str, forwards: list[str], *arguments: str) -> None:
        # The connection and all that runs there live through an outage until the boxes count as gone.
        count = max(1, round(self.cluster.lost_seconds / _ALIVE_SECONDS))
        options = [*_OPTIONS, "-o", f"ServerAliveCountMax={count}"]
        command = [str(self.cluster.directory / ".venv/bin/ratchet"), "part", part, *arguments]
        ssh = over_ssh(self.cluster, host, command, _UNBUFFERED, [*options, *forwards])
        self._process(f"{part} {host}", ssh, started)

    def _process(self, name: str, command: list[str], started: str) -> None:
        lines = partial(self.log, name)
        self.processes.append(HostProcess(f"the {name}", command, self.say, started, self.environment, lines))

    def _name_those_up(self) -> None:
        """Name the gateways that have come up to the front."""
        up = [host for host, gateway in self.gateways.items() if host in self.named or gateway.is_up.is_set()]
        if up == self.named:
            return
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({host: f"http://127.0.0.1:{self.ports[host]}" for host in up}, indent=1))
        fresh.replace(self.file)
        self.named = up
        self.say(f"boxes and workers are on {', '.join(up)}")


def carried_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the gateways and workers on the other hosts get, too."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES) and "\n" not in value}


def _front_variables(stack: Stack) -> dict[str, str]:
    url = f"http://127.0.0.1:{stack.ports['front']}"
    # Boxes call the adapter on their own loopback, as those of a gateway on this machine do.
    return {
        "E2B_API_KEY": stack.box_host_key(),
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "ADAPTER_PUBLIC_HOST": "127.0.0.1",
        QUEUES_VARIABLE: ",".join(queue for queue in QUEUES if queue != "image"),  # of the worker on this machine
    }


def _service_ports(stack: Stack) -> list[int]:
    """Return the ports of the front and of those services that are parts of this stack; a host reaches others by
    their address."""
    own = {"RATCHET_DATABASE_URL": "postgres", "TEMPORAL_ADDRESS": "temporal"}
    return [
        stack.ports["front"],
        *(stack.ports[name] for variable, name in own.items() if not stack.is_external(variable)),
    ]


def _back(*ports: int) -> list[str]:
    """Forward ports of a host's loopback to the same ports here."""
    return [argument for port in ports for argument in ("-R", f"127.0.0.1:{port}:127.0.0.1:{port}")]
