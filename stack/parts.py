"""The local stack as data: its parts, their commands, ports and environment.

A part whose service the environment names elsewhere (for example TEMPORAL_ADDRESS) is not started here.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ratchet import paths
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import MachineError
from ratchet.types import JsonObject
from sandboxes import docker_settings
from stack.listen_addresses import named_ports
from stack.planned_engines import EnginePart, engine_parts, planned_engines
from stack.ports import free_own_port, free_port, is_free
from stack.postgres import database_url
from stack.temporal_server import TemporalKind, temporal_kind

if TYPE_CHECKING:
    from store.database import Database

# All are below 32768, the start of the kernel's source-port range, so that a restarted part finds its port free.
PREFERRED_PORTS = {
    "temporal": 7233,
    "temporal_history": 7234,
    "temporal_matching": 7235,
    "temporal_worker": 7239,
    "temporal_ui": 8233,
    "adapter": 18001,
    "gateway": 8410,
    "front": 8411,
    "postgres": 8432,
    "engine": 18100,
    "ray": 6380,
    "ray_client": 6381,
    "ray_agent": 6382,
    "viewer": 8420,
    "worker_metrics": 8421,
    "codec_server": 8422,
}


POSTGRES_HOSTS = "RATCHET_POSTGRES_HOSTS"
BOX_HOSTS_FILE = "box_hosts.json"
WATCHER = "watcher"
"""The name of the part that probes the others."""
VIEWER = "viewer"
"""The name of the part that only shows: `ratchet up` does not wait for it, and no run needs it."""


@dataclass(slots=True, frozen=True)
class Part:
    """One supervised process. `stop_group`: with its whole group; False for the gateway, whose boxes outlive it."""

    name: str
    command: list[str]
    priority: int
    stop_group: bool = True
    stop_signal: str = "TERM"
    stop_wait_seconds: int = 15


_ADAPTER_HOSTS = ("ADAPTER_PUBLIC_HOST", "MASTER_ADDR")


class Stack:
    """The stack of one checkout; all its state is in `home`."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.ports = self._ports()

    def _ports(self, plan: JsonObject | None = None) -> dict[str, int]:
        """Return the recorded ports; for parts without one the preferred port if it is free, else any free port.

        A port that an engine's config names is no other part's. `plan`: to be served, instead of that of the file.
        """
        entries = planned_engines(self.plan_path, plan)
        kept, named = self._kept_ports(), named_ports([entry for served in entries.values() for entry in served])
        names = [engine.name for engine in engine_parts(entries)]
        for name in names:
            if kept.get(name) in named:
                del kept[name]
        engines = {name: PREFERRED_PORTS["engine"] + at for at, name in enumerate(names)}
        for name, preferred in (PREFERRED_PORTS | engines).items():
            if name not in kept:
                taken = {*kept.values(), *named}
                kept[name] = preferred if preferred not in taken and is_free(preferred) else free_port(taken)
        return kept

    def _kept_ports(self) -> dict[str, int]:
        if not self._ports_path.is_file():
            return {}
        try:
            return {str(name): int(port) for name, port in json.loads(self._ports_path.read_text()).items()}
        except (ValueError, TypeError, AttributeError):
            raise MachineError(
                f"{self._ports_path} is no JSON object of ports; end this stack's processes, delete the file, and run "
                "`ratchet up`"
            ) from None

    @property
    def _ports_path(self) -> Path:
        return self.home / "ports.json"

    def keep_ports(self) -> None:
        """Record this stack's ports, so that two checkouts can run side by side. Call it while no part of this stack
        runs.

        Ends processes that an earlier life of this stack has left on one of them. Raises MachineError if another
        program listens on a port that is recorded for this stack.
        """
        for name, port in self._kept_ports().items():
            if name in self._own_port_names() and not is_free(port):
                free_own_port(self.home, name, port, (self.ray_directory,))
        self.ports = self._ports()
        self.record_ports()

    def engines(self) -> list[EnginePart]:
        """Return the engines' parts by the plan that is served; without one there is one engine."""
        return engine_parts(planned_engines(self.plan_path))

    def engine_names(self) -> list[str]:
        return [engine.name for engine in self.engines()]

    def refresh_ports(self, plan: JsonObject | None = None) -> None:
        """Choose ports for the engines of a new plan, which is that of the file if none is given."""
        self.ports = self._ports(plan)

    def record_ports(self) -> None:
        """Record the ports, with those that an update has added, before a part uses one of them."""
        self.home.mkdir(parents=True, exist_ok=True)
        temporary = self._ports_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.ports, indent=1))
        temporary.rename(self._ports_path)

    def _own_port_names(self) -> set[str]:
        """Return the names of the ports that this stack itself listens on; services that run elsewhere need none."""
        several = {
            "temporal": ("temporal", "temporal_history", "temporal_matching", "temporal_worker", "temporal_ui"),
            "temporal-ui": (),
            "ray": ("ray", "ray_client", "ray_agent"),
            "worker": ("worker_metrics",),
        }
        return {name for part in self.parts() for name in several.get(part.name, (part.name,))}

    @property
    def ray_directory(self) -> Path:
        """Ray's own directory, outside of `home`: the paths of its unix sockets must be shorter than 108 characters."""
        return Path(f"/tmp/ratchet-ray-{os.getuid()}-{self.ports['ray']}")

    @property
    def plan_path(self) -> Path:
        """The file with the resolved config that engine and adapter serve."""
        return self.home / "stack.json"

    def kept_secret(self, name: str, prefix: str = "") -> str:
        """Return the secret in this file of the state directory; a new one if there is no file. Raises MachineError if
        the file is empty: a new secret would shut out what runs with the old one."""
        path = self.home / name
        if not path.is_file():
            self.home.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=self.home)
            with os.fdopen(descriptor, "w") as file:
                file.write(prefix + secrets.token_hex(20))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:  # another process made it at the same moment
                os.unlink(temporary)
            except OSError:  # a file system without hard links
                os.rename(temporary, path)
            else:
                os.unlink(temporary)
        if not (secret := path.read_text().strip()):
            raise MachineError(
                f"{path} is empty; delete it and run `ratchet up`, which restarts the parts with a new one"
            )
        return secret

    def _own(self) -> dict[str, str]:
        gateway = f"http://127.0.0.1:{self.ports['gateway']}"
        return {
            "RATCHET_HOME": str(self.home),
            "RATCHET_DATABASE_URL": database_url(self.ports["postgres"], self.postgres_hosts, self.postgres_password()),
            "TEMPORAL_ADDRESS": f"127.0.0.1:{self.ports['temporal']}",
            "TEMPORAL_NAMESPACE": "default",
            # In E2B's format, which older SDKs check. A command that only reads makes neither directory nor key.
            "E2B_API_KEY": self.kept_secret("gateway.key", "e2b_") if self.home.is_dir() else "",
            "E2B_API_URL": gateway,
            "E2B_SANDBOX_URL": gateway,
            "RAY_ADDRESS": f"127.0.0.1:{self.ports['ray']}",
            # By default Ray on Linux announces the machine's outer address; this switch keeps a local cluster on
            # loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "ADAPTER_PUBLIC_HOST": os.environ.get("MASTER_ADDR") or "127.0.0.1",
            "ADAPTER_BIND_HOST": bind_host(self.adapter_host),
            "ADAPTER_PORT": str(self.ports["adapter"]),
            "RATCHET_VIEWER_URL": self.viewer_address,
            "RATCHET_WORKER_METRICS": f"127.0.0.1:{self.ports['worker_metrics']}",
        }

    @property
    def adapter_host(self) -> str:
        """The host by which boxes call the adapter, other than those of the stack's own gateway."""
        return next((host for name in _ADAPTER_HOSTS if (host := os.environ.get(name))), "127.0.0.1")

    def is_external(self, name: str) -> bool:
        """Return whether the user's environment sets this variable to a service other than the stack's own."""
        value = os.environ.get(name)
        return bool(value) and value != self._own()[name]

    @property
    def has_gateway(self) -> bool:
        """True if the local gateway provides the boxes of this stack."""
        return not self.is_external("E2B_API_KEY") and os.environ.get("RATCHET_SANDBOX_PROVIDER", "e2b") == "e2b"

    def environment(self) -> dict[str, str]:
        """Return the variables with which parts and stock tools find the stack; the user's own values win."""
        own = self._own()
        if self.is_external("E2B_API_KEY"):
            del own["E2B_API_URL"], own["E2B_SANDBOX_URL"]
        if self.is_external("RAY_ADDRESS"):
            del own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        found = {name: os.environ[name] if self.is_external(name) else value for name, value in own.items()}
        if self.has_gateway:  # its boxes reach nothing but their own loopback, on which it forwards the adapter's port
            found["ADAPTER_PUBLIC_HOST"] = "127.0.0.1"
        return found

    def database(self) -> "Database":
        """Open a connection pool of size one. The import is local because most commands do not use the store."""
        from store.database import Database

        return Database(self.environment()["RATCHET_DATABASE_URL"], pool_size=1, is_patient=True)

    def parts(self) -> list[Part]:
        """Return the parts in start order, without those whose service the environment names elsewhere."""
        ratchet = [sys.executable, "-P", "-m", "cli.main", "part"]  # -P: see ratchet/import_path.py
        parts = [Part(WATCHER, [*ratchet, WATCHER], 5)]
        if not self.is_external("RATCHET_DATABASE_URL"):
            parts.append(Part("postgres", [*ratchet, "postgres"], 10, stop_signal="INT", stop_wait_seconds=30))
        if not self.is_external("TEMPORAL_ADDRESS"):
            if temporal_kind(self.home) is TemporalKind.DEV:
                parts.append(Part("temporal", [*ratchet, "temporal", "--dev"], 20, stop_signal="INT"))
            else:
                parts.append(Part("temporal", [*ratchet, "temporal"], 20, stop_signal="INT"))
                parts.append(Part("temporal-ui", [*ratchet, "temporal-ui"], 25))
        if self.has_gateway:
            parts.append(Part("gateway", [*ratchet, "gateway"], 30, stop_group=False))
        if not self.is_external("RAY_ADDRESS"):
            # Ray's head ignores SIGTERM and has no state to save.
            parts.append(Part("ray", [*ratchet, "ray"], 30, stop_wait_seconds=3))
        engines = self.engines()
        for engine in engines:
            command = [*ratchet, "engine", *(["--set", engine.engine_set] if engine.engine_set != DEFAULT_SET else [])]
            command += ["--number", str(engine.number)] if engine.number > 1 else []
            parts.append(Part(engine.name, command, 40, stop_wait_seconds=30))
        if engines:  # else it is not known yet what is to be served
            parts.append(Part("adapter", [*ratchet, "adapter"], 50))
        if docker_settings.needs_egress():
            parts.append(Part("egress", [*ratchet, "egress"], 55))
        parts.append(Part("learner", [*ratchet, "learner"], 60))
        parts.append(Part("worker", [*ratchet, "worker"], 70))
        # The host is an argument, so that another one restarts this part only.
        parts.append(Part(VIEWER, [*ratchet, VIEWER, "--host", self.viewer_host], 80, stop_wait_seconds=5))
        return parts

    def addresses(self) -> dict[str, str]:
        """Return part → its address as reached from this machine, without user names and passwords."""
        environment = self.environment()
        bound = environment["ADAPTER_BIND_HOST"]
        bound = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(bound, f"[{bound}]" if ":" in bound else bound)
        return {
            "postgres": environment["RATCHET_DATABASE_URL"].rpartition("@")[2].partition("?")[0],
            "temporal": environment["TEMPORAL_ADDRESS"],
            "temporal-ui": self.temporal_ui,
            "gateway": environment.get("E2B_API_URL", "E2B"),
            "ray": environment["RAY_ADDRESS"],
            "engine": f"http://127.0.0.1:{self.ports['engine']}",
            "adapter": f"http://{bound}:{environment['ADAPTER_PORT']}",
            VIEWER: self.viewer_address,
        }

    @property
    def viewer_host(self) -> str:
        return os.environ.get("RATCHET_VIEWER_HOST") or "127.0.0.1"

    @property
    def viewer_address(self) -> str:
        """The viewer's URL as reached from this machine."""
        host = "127.0.0.1" if self.viewer_host in ("0.0.0.0", "::") else self.viewer_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.ports[VIEWER]}"

    def box_host_key(self) -> str:
        """Return the API key of the gateways on other hosts of a launch; made once."""
        return self.kept_secret("box_host.key", "e2b_")

    @property
    def has_box_host(self) -> bool:
        """True if the boxes are those of gateways that `ratchet launch` has started on other hosts."""
        key = self.home / "box_host.key"
        return key.is_file() and os.environ.get("E2B_API_KEY") == key.read_text().strip()

    def box_gateways(self) -> dict[str, str]:
        """Return part → URL of these gateways. Such a part's name ends with the beginning of its boxes' ids."""
        from sandbox_gateway.front import host_tag

        named: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):  # the front, too, goes on without the file
            named = json.loads((self.home / BOX_HOSTS_FILE).read_bytes()) if self.has_box_host else {}
        return {f"gateway {name} i{host_tag(name)}": url for name, url in named.items()}

    @property
    def postgres_hosts(self) -> list[str]:
        """The addresses of a launch's head, on which the stack's own Postgres listens then, and of its hosts."""
        return os.environ.get(POSTGRES_HOSTS, "").split()

    def postgres_password(self) -> str:
        """Return the password with which they connect; made once. Empty without such hosts."""
        return self.kept_secret("postgres.password") if self.postgres_hosts else ""

    @property
    def temporal_ui(self) -> str:
        return f"http://127.0.0.1:{self.ports['temporal_ui']}"

    @property
    def shown_ui(self) -> str:
        """The Temporal UI that people open: RATCHET_TEMPORAL_UI, else the stack's own; empty if neither is known."""
        own = "" if self.is_external("TEMPORAL_ADDRESS") else self.temporal_ui
        return (os.environ.get("RATCHET_TEMPORAL_UI") or own).rstrip("/")

    def workflow_page(self, workflow_id: str) -> str:
        """Return a workflow's address in the Temporal UI, or how to name a UI if none is known."""
        known = self.environment()
        if not self.shown_ui:
            return f"{workflow_id} at {known['TEMPORAL_ADDRESS']} (RATCHET_TEMPORAL_UI=URL names its UI, for a link)"
        return f"{self.shown_ui}/namespaces/{known['TEMPORAL_NAMESPACE']}/workflows/{quote(workflow_id, safe='')}"

    def pages(self) -> str:
        """Say where the viewer and the Temporal UI are, and that a usual port of theirs was taken if it was."""
        found = []
        for name, port, address, is_own in (
            ("viewer", VIEWER, self.viewer_address, True),
            ("Temporal UI", "temporal_ui", self.shown_ui, self.shown_ui == self.temporal_ui),
        ):
            usual = PREFERRED_PORTS[port]
            taken = f" (port {usual} was taken)" if is_own and self.ports[port] != usual else ""
            found += [f"{name} {address}{taken}"] if address else []
        return ", ".join(found)


def bind_host(public_host: str) -> str:
    """Return the address that the adapter listens on, if ADAPTER_BIND_HOST names none.

    It is every address for a public host that is not loopback. A whole URL is that of a proxy, which is taken to run on
    this machine; set ADAPTER_BIND_HOST for one that does not.
    """
    if not public_host or public_host == "localhost" or "://" in public_host:
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(public_host.strip("[]"))
        if address.is_loopback:
            return str(address)
        return "::" if address.version == 6 else "0.0.0.0"
    return "0.0.0.0"
