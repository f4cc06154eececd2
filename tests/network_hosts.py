"""Hosts on one machine: network namespaces with an address each, joined by a bridge whose links can be cut.

The test's own process reaches every host, too. All hosts share the machine's files and processes. Needs root.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest


@dataclass(slots=True, frozen=True)
class NetworkHost:
    """One namespace. `link`: the bridge's end of its cable."""

    namespace: str
    address: str
    link: str

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one with this host's network."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *command]

    def inside_with_own(self, directory: Path, *command: str) -> list[str]:
        """Do what `inside` does, with an empty directory of the host's own at this path: hosts share all others."""
        script = 'mkdir -p "$0" && mount -t tmpfs none "$0" && exec "$@"'
        return self.inside("unshare", "--mount", "sh", "-c", script, str(directory), *command)

    def processes(self) -> list[psutil.Process]:
        """Return the processes with this host's network."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def commands(self) -> list[str]:
        """Return the commands of these processes."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[list[NetworkHost]]:
    """Make the hosts and their network; skip the test if this machine does not let us."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("network namespaces need root and the programs ip and nsenter (iproute2, util-linux)")
    mark, third = secrets.token_hex(3), 1 + secrets.randbelow(250)
    bridge = f"rb{mark}"
    hosts = [
        NetworkHost(f"ratchet-{mark}-{number}", f"10.77.{third}.{number}", f"rl{mark}{number}")
        for number in range(1, count + 1)
    ]
    try:
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, check=False).returncode:
            pytest.skip("this machine does not let us make a network bridge")
        _ip("address", "add", f"10.77.{third}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "link", "delete", host.link], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def ssh_server(
    addresses: Sequence[str], port: int, prefixes: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, ...]]:
    """Run a server per address, with keys of their own; give ssh's arguments that reach all of them.

    `prefixes`: what each server's command begins with, such as that of a host. Skips the test if there is no sshd.
    """
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd here; install openssh-server")
    directory = Path(tempfile.mkdtemp(prefix="sshd", dir=Path.home()))  # sshd refuses keys below /tmp
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    settings = {
        "HostKey": directory / "host", "AuthorizedKeysFile": directory / "user.pub", "PidFile": "none",
        "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "prohibit-password",
    }  # fmt: skip
    (directory / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    with contextlib.ExitStack() as ended:
        ended.callback(shutil.rmtree, directory)
        for number, address in enumerate(addresses):
            log = directory / f"log{number}"
            listen = ["-o", f"ListenAddress={address}:{port}"]
            command = [program, "-D", "-E", log, "-f", directory / "sshd_config", *listen]
            server = subprocess.Popen([*(prefixes[number] if prefixes else ()), *command])
            ended.callback(server.wait)
            ended.callback(server.kill)
            while not log.exists() or "listening" not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
        unknown = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
        yield ("-p", str(port), "-i", str(directory / "user"), *unknown)
