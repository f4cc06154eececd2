"""A Docker daemon of our own: Debian's `docker.io`, on a socket and a directory that nobody else uses, gone after the tests.

Why here: the back end is for a real daemon, so it is tested with one; no image is pulled, the tests import theirs.
Called by: pytest. Skips with the reason where a daemon cannot be had.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from activities.sandboxes.base import Sandbox
from activities.sandboxes.docker import DockerProvider
from tests.integration.sandboxes import image_files
from tests.integration.sandboxes.conftest import make_box

START_SECONDS = 120.0
NETWORK = f"ratchet-test-{uuid.uuid4().hex[:8]}"
_POLICY = Path("/usr/sbin/policy-rc.d")
_PROGRAMS = (*image_files.PROGRAMS, "head", "tr", "pgrep", "whoami", "timeout", "dirname", "rm", "true", "env", "chmod", "mv", "test")


def _install() -> None:
    """Debian's daemon; its service is not started."""
    if shutil.which("dockerd"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("there is no dockerd, and installing Debian's docker.io needs root and apt-get")
    own_policy = not _POLICY.exists()
    if own_policy:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        install = ["apt-get", "install", "-y", "--no-install-recommends", "docker.io", "iptables", "tini"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (install, ["apt-get", "update"], install):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if shutil.which("dockerd"):
                return
        pytest.skip(f"Debian's docker.io cannot be installed: {done.stderr.strip()[-300:]}")
    finally:
        if own_policy:
            _POLICY.unlink()


def _start(directory: Path, *options: str) -> subprocess.Popen[bytes] | None:
    """None: the daemon ended by itself, as one does that may not change the machine's packet filter."""
    command = [
        "dockerd",
        "--host",
        f"unix://{directory}/docker.sock",
        "--data-root",
        f"{directory}/data",
        "--exec-root",
        f"{directory}/exec",
    ]
    command += ["--pidfile", f"{directory}/pid", "--bridge=none", "--ip-forward=false", *options]
    with (directory / "dockerd.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        if docker(directory, "version").returncode == 0:
            return process
        time.sleep(0.2)
    if process.poll() is None:
        _end(process)
    return None


def docker(directory: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = ["docker", "--host", f"unix://{directory}/docker.sock", *arguments]
    return subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def docker_directory() -> Iterator[Path]:
    """Where the daemon's socket and files are."""
    _install()
    directory = Path(tempfile.mkdtemp(prefix="ratchet-docker-"))
    process = None
    try:
        for options in ((), ("--iptables=false",), ("--iptables=false", "--storage-driver=vfs")):
            process = _start(directory, *options)
            if process is not None:
                break
        if process is None:
            words = (directory / "dockerd.log").read_text(errors="replace").strip().splitlines()
            pytest.skip(f"dockerd does not run here: {words[-1][-300:] if words else 'it says nothing'}")
        _import_image(directory)
        yield directory
        found = docker(directory, "ps", "-aq").stdout.decode().split()
        if found:
            docker(directory, "rm", "-f", *found)
        docker(directory, "network", "rm", NETWORK)  # or its bridge would outlive the daemon
    finally:
        if process is not None and process.poll() is None:
            _end(process)
        shutil.rmtree(directory, ignore_errors=True)


def _import_image(directory: Path) -> None:
    """`host`: the machine's own programs, as many as the contract needs."""
    tree = image_files.make_tree(directory / "tree", _PROGRAMS)
    shutil.copy(tree / "bin" / "bash", tree / "bin" / "sh")
    (tree / "tmp").chmod(0o1777)
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


@pytest.fixture
async def provider(docker_directory: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(f"unix://{docker_directory}/docker.sock", network=NETWORK, memory_bytes=128 << 20)
    yield made
    for info in await made.list({}):
        await made.kill(info.id)
    await made.close()


@pytest.fixture
async def box(provider: DockerProvider) -> AsyncIterator[Sandbox]:
    async with await make_box(provider) as made:
        yield made
