"""The hosts of a launch, read from a YAML file or from a host file with one address per line."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet.config import RunConfig
from ratchet.config_engines import LOCAL
from ratchet.config_sources import explain_validation
from ratchet.errors import ConfigError
from ratchet.yaml_text import read_yaml
from stack.listen_addresses import own_hosts

_REMEDY = "; name a host file, one address per line, or a YAML file in the variable HOSTFILE or as the argument"
DEFAULT_HOST_FILE = Path("/root/mpi_rack_hostfile")


class ClusterHost(BaseModel):
    """One worker host.

    `gpus`: number of its GPUs, None if it is not known; the launch then checks no index. `boxes`: boxes run there,
    with a worker beside them, and none on this machine; such a host is no Ray node unless its GPUs are given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: Annotated[int, Field(ge=0)] | None = None
    boxes: bool = False


class Cluster(BaseModel):
    """The hosts of one launch; the head is the machine that launches. Without hosts everything runs there.

    `head`: its address, as the workers reach it. `ssh`: further arguments of ssh, such as `[-p, "2222"]`. `port`: of
    Ray's head. `directory`: the checkout, at the same path on every host. `lost_seconds`: time without an answer after
    which the boxes of a host count as gone, so that their agents are replayed in new ones; until then they are in an
    outage. `source`: the file that this was read from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: str
    hosts: dict[str, ClusterHost]
    user: str | None = None
    ssh: tuple[str, ...] = ()
    port: Annotated[int, Field(gt=0, lt=65536)] = 6379
    directory: Path = Field(default_factory=Path.cwd)
    lost_seconds: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 600.0
    source: Path = Path()

    @property
    def ray_address(self) -> str:
        return f"{self.head}:{self.port}"

    @property
    def ray_hosts(self) -> list[str]:
        """The hosts that are nodes of the Ray cluster, on which engines and ranks can be placed."""
        return [address for address, host in self.hosts.items() if not host.boxes or host.gpus is not None]

    @property
    def box_hosts(self) -> list[str]:
        """The hosts on which the boxes run; none for this machine, or a service."""
        return [address for address, host in self.hosts.items() if host.boxes]

    def num_gpus(self, of_head: int) -> dict[str, int]:
        """Return node -> number of its GPUs, as far as it is known."""
        known = {address: host.gpus for address, host in self.hosts.items() if host.gpus is not None}
        return {LOCAL: of_head, **known}


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a `.yaml` file or a host file, which may list this machine, the head, too. Raises ConfigError
    naming file, value and expectation."""
    values = read_yaml(path, _REMEDY) if path.suffix in (".yaml", ".yml") else {"hosts": _hosts(path)}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    hosts = values.get("hosts", "missing")
    if isinstance(hosts, list | dict | None):
        listed = hosts if isinstance(hosts, dict) else dict.fromkeys(hosts or ())
        found = {str(host): value or {} for host, value in listed.items()}
        own = own_hosts()
        other = next((host for host in found if host not in own), "127.0.0.1")
        head = str(values.get("head") or os.environ.get("MASTER_ADDR") or _own_address(other))
        kept = {host: value for host, value in found.items() if host not in {head, *own}}
        values |= {"head": head, "hosts": kept, "source": path}
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        raise explain_validation(error, str(path), Cluster) from None


def require_hosts(cluster: Cluster, config: RunConfig) -> None:
    """Raise ConfigError for parts on an unknown host, or a host without parts."""
    named = {entry.host for entry in config.engines if entry.address is None} | set(config.training.gpus or {})
    for host in sorted(named - {LOCAL, *cluster.ray_hosts}):
        if host in cluster.hosts:
            raise ConfigError(f"host {host} has boxes only; give its number of GPUs (gpus) to place other parts on it")
        raise ConfigError(
            f"host {host} of engines or training.gpus is not among the cluster's: {', '.join(cluster.hosts)}; this "
            f"machine is called {LOCAL}"
        )
    for host in cluster.ray_hosts:
        if host not in named and config.training.gpus is not None:
            has = f" ({gpus} GPUs)" if (gpus := cluster.hosts[host].gpus) is not None else ""
            raise ConfigError(f"host {host}{has} has no part; name it in engines or training.gpus, or leave it out")


def _hosts(path: Path) -> dict[str, dict[str, int]]:
    """Read one address per line; `slots=N` of MPI's host files is the number of GPUs."""
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){_REMEDY}") from None
    found: dict[str, dict[str, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            ipaddress.ip_address(words[0])
            slots = [int(word.removeprefix("slots=")) for word in words[1:]]
            found[words[0]] = {"gpus": slots[0]} if slots else {}
        except ValueError:
            raise ConfigError(
                f"{path}, line {number}: expected an IP address, or one with slots=N for its GPUs, "
                f"found {line.strip()!r}"
            ) from None
    return found


def _own_address(host: str) -> str:
    """Return this machine's address on the way to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise ConfigError(f"host {host} has no route from here ({error}); set `head` or MASTER_ADDR") from None
        return str(probe.getsockname()[0])
