"""The local stack as data: its parts, their ports, their environment.

Why here: one place knows which part runs with which command, and which of them an environment variable replaces by a real cluster's.
Called by: `stack.supervisor` (starts it) and the CLI (asks it).
"""

import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from activities.sandboxes import docker_settings
from ratchet import paths
from ratchet.errors import MachineError
from stack.ports import free_port, is_free
from stack.postgres import database_url

if TYPE_CHECKING:
    from ratchet.store.database import Database

# All below 32768, from where the kernel takes source ports: a part that starts anew must find its port free.
PREFERRED_PORTS = {
    "temporal": 7233,
    "temporal_ui": 8233,
    "adapter": 18001,
    "gateway": 8410,
    "postgres": 8432,
    "engine": 18100,
    "ray": 6380,
    "ray_client": 6381,
    "ray_agent": 6382,
}


@dataclass(slots=True, frozen=True)
class Part:
    """`stop_group`: end the part's whole process group with it; the gateway's boxes must outlive it."""

    name: str
    command: list[str]
    priority: int
    stop_group: bool = True
    stop_signal: str = "TERM"
    stop_wait_seconds: int = 15


def free_ports(home: Path) -> None:
    """Chooses ports that nobody prefers, for a stack that must not meet any other: the tests'."""
    (home / "ports.json").write_text(json.dumps({name: free_port() for name in PREFERRED_PORTS}))


class Stack:
    """One checkout's stack; everything about it lies in `home`."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.ports = self._ports()

    def _ports(self) -> dict[str, int]:
        """Those that are kept; for the others, preferred ones where they are free, else any."""
        kept = self._kept_ports()
        for name, preferred in PREFERRED_PORTS.items():
            if name not in kept:
                kept[name] = preferred if is_free(preferred) else free_port(kept.values())
        return kept

    def _kept_ports(self) -> dict[str, int]:
        return dict(json.loads(self._ports_path.read_text())) if self._ports_path.is_file() else {}

    @property
    def _ports_path(self) -> Path:
        return self.home / "ports.json"

    def keep_ports(self) -> None:
        """Fixes this stack's ports from now on, so that two checkouts run side by side; called while nothing of ours runs.

        Raises MachineError where somebody else listens on a port that was ours before.
        """
        for name, port in self._kept_ports().items():
            if name in self._own_port_names() and not is_free(port):
                raise MachineError(
                    f"port {port} ({name}) is taken by another program; end that, or remove the line from {self._ports_path}"
                )
        self.ports = self._ports()
        self.home.mkdir(parents=True, exist_ok=True)
        temporary = self._ports_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.ports, indent=1))
        temporary.rename(self._ports_path)

    def _own_port_names(self) -> set[str]:
        """A service that the environment names elsewhere needs no port here."""
        several = {"temporal": ("temporal", "temporal_ui"), "ray": ("ray", "ray_client", "ray_agent")}
        return {name for part in self.parts() for name in several.get(part.name, (part.name,))}

    @property
    def plan_path(self) -> Path:
        """The resolved config that engine and adapter serve."""
        return self.home / "stack.json"

    def _gateway_key(self) -> str:
        """Of the local gateway: made once; E2B's own format, since older SDKs check it."""
        path = self.home / "gateway.key"
        if not path.is_file():
            self.home.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write("e2b_" + secrets.token_hex(20))
        return path.read_text()

    def _own(self) -> dict[str, str]:
        gateway = f"http://127.0.0.1:{self.ports['gateway']}"
        return {
            "RATCHET_HOME": str(self.home),
            "RATCHET_DATABASE_URL": database_url(self.ports["postgres"]),
            "TEMPORAL_ADDRESS": f"127.0.0.1:{self.ports['temporal']}",
            "TEMPORAL_NAMESPACE": "default",
            "E2B_API_KEY": self._gateway_key(),
            "E2B_API_URL": gateway,
            "E2B_SANDBOX_URL": gateway,
            "RAY_ADDRESS": f"127.0.0.1:{self.ports['ray']}",
            # Ray on Linux would announce the machine's outer address; this switch of its own keeps a local cluster on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "ADAPTER_PUBLIC_HOST": "127.0.0.1",
            "ADAPTER_BIND_HOST": "127.0.0.1",
            "ADAPTER_PORT": str(self.ports["adapter"]),
        }

    def is_external(self, name: str) -> bool:
        """Whether the user's environment names a service of their own instead of ours."""
        value = os.environ.get(name)
        return bool(value) and value != self._own()[name]

    @property
    def has_gateway(self) -> bool:
        """Whether the boxes of this stack are the local gateway's."""
        return not self.is_external("E2B_API_KEY") and os.environ.get("RATCHET_SANDBOX_PROVIDER", "e2b") == "e2b"

    def environment(self) -> dict[str, str]:
        """What every part, and a stock tool in the user's shell, needs to find the stack. The user's own values win."""
        own = self._own()
        if self.is_external("E2B_API_KEY"):
            del own["E2B_API_URL"], own["E2B_SANDBOX_URL"]
        if self.is_external("RAY_ADDRESS"):
            del own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        return {name: os.environ[name] if self.is_external(name) else value for name, value in own.items()}

    def database(self) -> "Database":
        """For one question after the other. Imported late: not every command asks the store."""
        from ratchet.store.database import Database

        return Database(self.environment()["RATCHET_DATABASE_URL"], pool_size=1)

    def parts(self) -> list[Part]:
        """In the order in which they start; a service that the environment names elsewhere is left out."""
        ratchet = [sys.executable, "-m", "cli.main"]
        parts = []
        if not self.is_external("RATCHET_DATABASE_URL"):
            parts.append(Part("postgres", [*ratchet, "postgres"], 10, stop_signal="INT", stop_wait_seconds=30))
        if not self.is_external("TEMPORAL_ADDRESS"):
            parts.append(Part("temporal", [*ratchet, "temporal"], 20, stop_signal="INT"))
        if self.has_gateway:
            parts.append(Part("gateway", [*ratchet, "gateway"], 30, stop_group=False))
        if not self.is_external("RAY_ADDRESS"):
            # Ray's head does not end when asked and holds nothing that would be missed.
            parts.append(Part("ray", [*ratchet, "ray"], 30, stop_wait_seconds=3))
        parts.append(Part("engine", [*ratchet, "engine"], 40, stop_wait_seconds=30))
        parts.append(Part("adapter", [*ratchet, "adapter"], 50))
        if docker_settings.needs_egress():
            parts.append(Part("egress", [*ratchet, "egress"], 55))
        parts.append(Part("learner", [*ratchet, "learner"], 60))
        parts.append(Part("worker", [*ratchet, "worker"], 70))
        return parts

    def addresses(self) -> dict[str, str]:
        """Part → where it is reached from this machine."""
        bound = self.environment()["ADAPTER_BIND_HOST"]
        return {
            "postgres": self.environment()["RATCHET_DATABASE_URL"],
            "temporal": self.environment()["TEMPORAL_ADDRESS"],
            "gateway": self.environment().get("E2B_API_URL", "E2B"),
            "ray": self.environment()["RAY_ADDRESS"],
            "engine": f"http://127.0.0.1:{self.ports['engine']}",
            "adapter": f"http://{'127.0.0.1' if bound == '0.0.0.0' else bound}:{self.ports['adapter']}",
        }

    @property
    def temporal_ui(self) -> str:
        return f"http://127.0.0.1:{self.ports['temporal_ui']}"


def require_space(home: Path, needed_bytes: int = 2 << 30) -> None:
    """Raises MachineError where the state directory's disk is nearly full: a full disk half way is worse than none."""
    status = os.statvfs(home if home.exists() else home.parent)
    free = status.f_bavail * status.f_frsize
    if free < needed_bytes:
        raise MachineError(
            f"only {free >> 20} MiB are free where {home} lies, {needed_bytes >> 20} MiB are needed; free space or set RATCHET_HOME to another disk"
        )
