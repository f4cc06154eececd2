"""A Docker daemon for these tests: Debian's `docker.io`, with its own socket, directory and network namespace.

The back end is tested with a real daemon. No image is pulled, the tests import theirs. The machine's packet filter and
interfaces stay unchanged: the daemon sees only those of its namespace. Tests skip with the reason if no daemon can
run.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ratchet import paths
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, ensure_python_layer
from sandboxes.base import BoxLimits, Sandbox
from sandboxes.docker import DockerProvider
from stack.parts import Stack
from tests.integration.sandbox_gateway import image_files
from tests.integration.sandbox_gateway.conftest import (  # noqa: F401  # fixtures
    CHECKOUT,
    adapter_port,
    make_box,
    outside_address,
)
from tests.integration.workflows.conftest import collector, home, loop, model  # noqa: F401  # fixtures

START_SECONDS = 120.0
_POLICY = Path("/usr/sbin/policy-rc.d")
# Programs that the contract, the stages, the launcher and the graders need in an image.
_PROGRAMS = (
    *image_files.PROGRAMS,
    "base64", "chmod", "cp", "cut", "dirname", "env", "find", "git", "gzip", "head", "ln", "mkfifo", "mktemp", "mv",
    "pgrep", "readlink", "rm", "rmdir", "sed", "seq", "setpriv", "setsid", "sha256sum", "sort", "su", "tail", "tar",
    "tee", "test", "timeout", "tr", "true", "uname", "uniq", "wc", "whoami", "xargs",
)  # fmt: skip


def _install() -> None:
    """Install Debian's daemon without starting its service."""
    if shutil.which("dockerd"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("there is no dockerd, and installing Debian's docker.io needs root and apt-get")
    own_policy = not _POLICY.exists()
    if own_policy:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        install = ["apt-get", "install", "-y", "--no-install-recommends", "docker.io", "iptables", "iproute2", "tini"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (install, ["apt-get", "update"], install):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if shutil.which("dockerd"):
                return
        pytest.skip(f"Debian's docker.io cannot be installed: {done.stderr.strip()[-300:]}")
    finally:
        if own_policy:
            _POLICY.unlink()


def dockerd(directory: Path, *options: str) -> list[str]:
    """Return the command of a daemon in a network namespace of its own."""
    return [
        "unshare",
        "--net",
        "dockerd",
        "--host",
        f"unix://{directory}/docker.sock",
        "--data-root",
        f"{directory}/data",
        "--exec-root",
        f"{directory}/exec",
        "--pidfile",
        f"{directory}/pid",
        "--bridge=none",
        *options,
    ]


def start_daemon(directory: Path, command: list[str], **variables: str) -> subprocess.Popen[bytes] | None:
    """Start a daemon with Docker's API; None if it ended by itself."""
    with (directory / "dockerd.log").open("ab") as log:
        environment = os.environ | variables
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        if docker(directory, "version").returncode == 0:
            return process
        time.sleep(0.2)
    if process.poll() is None:
        end_daemon(process)
    return None


def docker(directory: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = ["docker", "--host", f"unix://{directory}/docker.sock", *arguments]
    return subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload]


def end_daemon(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def docker_directory() -> Iterator[Path]:
    """The directory with the daemon's socket and files."""
    _install()
    directory = Path(tempfile.mkdtemp(prefix="ratchet-docker-"))
    process = None
    try:
        for options in ((), ("--storage-driver=vfs",)):
            process = start_daemon(directory, dockerd(directory, *options))
            if process is not None:
                break
        if process is None:
            words = (directory / "dockerd.log").read_text(errors="replace").strip().splitlines()
            pytest.skip(f"dockerd does not run here: {words[-1][-300:] if words else 'it says nothing'}")
        import_image(directory)
        yield directory
        found = docker(directory, "ps", "-aq").stdout.decode().split()
        if found:
            docker(directory, "rm", "-f", *found)
    finally:
        if process is not None and process.poll() is None:
            end_daemon(process)
        shutil.rmtree(directory, ignore_errors=True)


def import_image(directory: Path) -> None:
    """Import `host`: the machine's own programs that boxes need, and an interpreter at the path of local boxes."""
    layer = ensure_python_layer(paths.cache())
    tree = image_files.make_tree(directory / "tree", _PROGRAMS)
    shutil.copy(tree / "bin" / "bash", tree / "bin" / "sh")
    shutil.copytree(layer, tree / PYTHON_LAYER_PATH[1:], symlinks=True)
    (tree / "tmp").chmod(0o1777)
    (tree / "var" / "tmp").mkdir(parents=True, mode=0o1777)
    (tree / "root").chmod(0o700)
    (tree / "workspace").mkdir()
    (tree / "home" / "agent").mkdir(parents=True)
    (tree / "usr").mkdir(exist_ok=True)
    os.chown(tree / "home" / "agent", 1000, 1000)
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n")
    (tree / "etc" / "group").write_text("root:x:0:\nagent:x:1000:\n")
    (tree / "etc" / "profile").write_text("PATH=/usr/local/bin:/usr/bin:/bin\n")
    done = docker(directory, "import", "-", "host:latest", input=image_files.tree_layer(tree))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def docker_pid(docker_directory: Path) -> int:
    """The daemon's pid; its network namespace contains the boxes' bridge."""
    return int((docker_directory / "pid").read_text())


@contextlib.contextmanager
def egress(directory: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`ratchet part egress` beside the daemon, for boxes of the adapter that the environment names."""
    own = {"DOCKER_HOST": f"unix://{directory}/docker.sock", "RATCHET_HOME": f"{directory}/home"}
    values = {**os.environ, **own, **environment}
    with subprocess.Popen([sys.executable, "-m", "cli.main", "part", "egress"], cwd=CHECKOUT, env=values) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="session")
def own_environment(docker_directory: Path, home: Path) -> Iterator[dict[str, str]]:  # noqa: F811
    """The services' environment with docker as provider."""
    own = {"RATCHET_SANDBOX_PROVIDER": "docker", "DOCKER_HOST": f"unix://{docker_directory}/docker.sock"}
    with egress(docker_directory, Stack(home).environment()):
        yield own


@pytest.fixture(scope="session")
def way(docker_directory: Path, adapter_port: int) -> Iterator[str]:  # noqa: F811
    """The adapter's address, with an egress for boxes of that address."""
    values = {"ADAPTER_PUBLIC_HOST": "127.0.0.1", "ADAPTER_PORT": str(adapter_port)}
    with egress(docker_directory, values):
        yield f"127.0.0.1:{adapter_port}"


@pytest.fixture
def adapter_address(way: str) -> str:
    return way


@pytest.fixture
async def provider(docker_directory: Path, way: str) -> AsyncIterator[DockerProvider]:
    limits = BoxLimits(memory_bytes=128 << 20, max_processes=512)
    made = DockerProvider(f"unix://{docker_directory}/docker.sock", adapter=way, limits=limits)
    yield made
    for info in await made.list({}):
        await made.kill(info.id)
    await made.close()


@pytest.fixture
async def box(provider: DockerProvider) -> AsyncIterator[Sandbox]:
    async with await make_box(provider) as made:
        yield made
