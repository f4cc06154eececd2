"""The Docker back end: boxes as containers of a Docker daemon, over its API.

The container's name is the idempotency key, and its first process ends it at its time to live. An agent's box has no
network but its loopback, on which `ratchet part egress` listens at the adapter's port from outside, so there is no
bridge or packet filter to configure. A network of the user's own may be used instead.
"""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from ratchet.errors import ConfigError, SandboxBusyError, SandboxGoneError, UnknownImageError
from sandboxes.base import BoxLimits, Capabilities, Network, OpenedFirst, Sandbox, SandboxInfo
from sandboxes.docker_box import DEADLINE_FILE, DockerSandbox
from sandboxes.docker_errors import remove_container, require_running, service_errors
from sandboxes.docker_settings import EGRESS_LABEL

_MAKING_SECONDS = 20.0
_MAKING_POLL_SECONDS = 0.1
_CAPABILITIES_KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_DEFAULT_LIMITS = BoxLimits(memory_bytes=2 << 30, max_processes=512)
# /proc/uptime is the host's clock since boot, which the box cannot set.
_LIFE = f"""
now() {{ read -r up _ </proc/uptime; up=${{up%%.*}}; }}
now; mkdir -p /run; umask 077; echo $((up + $1)) >{DEADLINE_FILE}
while now; read -r end <{DEADLINE_FILE} && [ "$up" -lt "$end" ]; do sleep 1; done
"""
# State 0A is a listening socket; the script needs only bash and sleep.
_AWAIT_WAY = """
while [ $((tries += 1)) -le %d ]; do
  while read -r _ local _ state _; do [ "$state" = 0A ] && [ "${local#*:}" = %04X ] && exit 0; done </proc/net/tcp
  sleep 0.05
done
exit 1
"""
_LIVE_STATES = ("created", "running", "paused", "restarting")


class DockerProvider:
    """Creates containers. `url` None: DOCKER_HOST, else the local socket. Images are not pulled.

    `adapter`: host:port of the adapter, which a box finds at 127.0.0.1 and the same port if `ratchet part egress` runs
    beside the daemon. `network`: a network of the user's own, used instead. `way_seconds`: limit for the egress.
    """

    def __init__(
        self,
        url: str | None = None,
        network: str | None = None,
        adapter: str = "127.0.0.1:18001",
        limits: BoxLimits = _DEFAULT_LIMITS,
        max_ttl_seconds: int = 86_400,
        way_seconds: int = 30,
    ) -> None:
        self._url = url
        self._network = network
        self._adapter = adapter
        self._limits = limits
        self._way_seconds = way_seconds
        self.name = "docker"
        self.capabilities = Capabilities(
            pause=False,
            network_policy=network is None,  # the user's own network may lead anywhere
            limits=True,
            max_ttl_seconds=max_ttl_seconds,
        )
        self._client: aiodocker.Docker | None = None

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        network: Network = True,
        limits: BoxLimits | None = None,
    ) -> Sandbox:
        name = f"ratchet-{idempotency_key}"
        later = network.then if isinstance(network, OpenedFirst) else bool(network)
        is_open = network not in (True, False)
        if isinstance(network, OpenedFirst) and self._network is not None:
            own = f"the network {self._network} (RATCHET_DOCKER_NETWORK)"
            raise ConfigError(f"sandbox.network: pre_commands: {own} cannot be closed; leave one of them out")
        has_way = later and self._network is None
        name_of_network = self._network or ("bridge" if is_open else "none")
        with service_errors(f"the new box of image {image}", missing=ConfigError):
            config: dict[str, Any] = {
                "Image": image,
                "Entrypoint": ["/bin/sh", "-c", _LIFE, "life"],
                "Cmd": [str(ttl_seconds)],
                "User": "root",
                "Hostname": "box",
                "Labels": {**metadata, EGRESS_LABEL: self._adapter} if has_way else dict(metadata),
                "HostConfig": self._host_config(limits or BoxLimits(), name_of_network if later or is_open else "none"),
            }
            try:
                container = await self._docker().containers.create(config, name=name)
            except DockerError as error:
                if error.status == 404 and "image" in error.message.lower():
                    raise UnknownImageError(f"the new box of image {image}: {error.message}") from error
                if error.status != 409:
                    raise
                container = await self._being_made(name)
            await container.start()  # no effect if it runs already
        box = DockerSandbox(container)
        if has_way:
            await self._await_way(box)
        return box

    async def _await_way(self, box: DockerSandbox) -> None:
        """Wait for the egress, without which the agent could not reach the adapter. Raises SandboxBusyError."""
        port = int(self._adapter.rpartition(":")[2])
        found = await box.exec(_AWAIT_WAY % (20 * self._way_seconds, port), check=False, timeout=4 * self._way_seconds)
        if found.exit_code != 0:
            raise SandboxBusyError(
                f"box {box.id[:12]} has no way to the adapter at {self._adapter}:"
                " `ratchet part egress` has to run beside the Docker daemon, as root"
                " and with the same ADAPTER_PUBLIC_HOST and ADAPTER_PORT (`ratchet up` starts one)"
            )

    async def _being_made(self, name: str) -> DockerContainer:
        """Wait for a container that another call creates: the daemon reserves the name before it shows it."""
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return await self._docker().containers.get(name)
            except DockerError as error:
                if error.status != 404 or time.monotonic() > until:
                    raise
            await asyncio.sleep(_MAKING_POLL_SECONDS)

    def _host_config(self, limits: BoxLimits, network: str) -> dict[str, Any]:
        memory = limits.memory_bytes or self._limits.memory_bytes
        cpus = limits.num_cpus or self._limits.num_cpus
        return {
            "Memory": memory or 0,
            "MemorySwap": memory or 0,
            "PidsLimit": limits.max_processes or self._limits.max_processes or 0,
            "NanoCpus": int((cpus or 0) * 1e9),
            "AutoRemove": True,
            "Init": True,
            "NetworkMode": network,
            "CapDrop": ["ALL"],
            "CapAdd": list(_CAPABILITIES_KEPT),
            "SecurityOpt": ["no-new-privileges"],
        }

    async def connect(self, sandbox_id: str) -> Sandbox:
        with service_errors(sandbox_id):
            container = await self._docker().containers.get(sandbox_id)
        await require_running(container)
        return DockerSandbox(container)

    async def kill(self, sandbox_id: str) -> bool:
        try:
            with service_errors(sandbox_id):
                return await remove_container(self._docker().containers.container(sandbox_id))
        except SandboxGoneError:
            return False

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        with service_errors(sandbox_id):
            found = await self._docker().containers.get(sandbox_id)
            made = datetime.fromisoformat(found["Created"])
            return _info(found.id, found["Config"]["Labels"], made, found["State"]["Status"])

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        labels = [f"{name}={value}" for name, value in metadata.items()]
        with service_errors("the list of boxes"):
            wanted = {"label": labels, "status": list(_LIVE_STATES)}
            found = await self._docker().containers.list(all=True, filters=wanted)
            boxes = [
                _info(one.id, one["Labels"], datetime.fromtimestamp(one["Created"], UTC), one["State"])
                for one in found
                if any(name.startswith("/ratchet-") for name in one["Names"])
            ]
        return [box for box in boxes if box.carries(metadata)]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _docker(self) -> aiodocker.Docker:
        """Return the client, made at the first call because it belongs to the running event loop."""
        if self._client is None:
            try:
                self._client = aiodocker.Docker(url=self._url)
            except ValueError as error:  # no DOCKER_HOST, and no local socket yet
                raise SandboxBusyError(f"there is no Docker daemon: {error}") from error
        return self._client


def _info(container_id: str, labels: Mapping[str, str] | None, started_at: datetime, state: str) -> SandboxInfo:
    metadata = {name: value for name, value in (labels or {}).items() if name != EGRESS_LABEL}
    return SandboxInfo(container_id, metadata, started_at, "paused" if state == "paused" else "running")
