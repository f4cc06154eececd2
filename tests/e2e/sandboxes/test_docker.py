"""The sandbox contract over a real Docker daemon, and what only this back end has to show."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.sandboxes.base import Sandbox
from activities.sandboxes.docker import DockerProvider
from ratchet.errors import SandboxBusyError
from tests.e2e.sandboxes.conftest import docker, relay
from tests.integration.sandboxes.conftest import eventually, make_box
from tests.integration.sandboxes.contract import *  # noqa: F403

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


async def test_a_daemon_that_is_not_there_is_busy(tmp_path: Path) -> None:
    nowhere = DockerProvider(f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxBusyError):
        await make_box(nowhere)
    await nowhere.close()


async def test_limits_and_rights(docker_directory: Path, box: Sandbox) -> None:
    form = "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}}"
    facts = docker(docker_directory, "inspect", "--format", form, box.id).stdout.decode()
    assert facts.strip() == f"{128 << 20} 512 [ALL] [no-new-privileges]"
    status = (await box.exec("cat /proc/self/status")).stdout
    assert "NoNewPrivs:\t1" in status and "CapEff:\t00000000000000fb" in status


async def test_a_box_without_network_has_no_address(provider: DockerProvider) -> None:
    closed = await provider.create("host", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex, network=False)
    async with closed:
        devices = (await closed.exec("cat /proc/net/dev")).stdout.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]


async def test_a_terminal_in_a_container(docker_directory: Path, box: Sandbox) -> None:
    script = "import sys; from ratchet.cli.terminal import run_docker_terminal; sys.exit(run_docker_terminal(*sys.argv[1:]))"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, box.id, "agent"],
        input=b"echo $(whoami) here; exit 5\n",
        env={**os.environ, "DOCKER_HOST": f"unix://{docker_directory}/docker.sock"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, b"agent here\n")


@pytest.fixture(scope="module")
def outside(docker_pid: int) -> Iterator[tuple[str, int]]:
    """A web server on another machine, as the daemon sees it: in a namespace of its own at the other end of a cable."""
    server = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-m", "http.server", "8080"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ours, theirs = (("nsenter", "--net", "--target", str(pid), "ip") for pid in (docker_pid, server.pid))
        for command in (
            (*ours, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(server.pid)),
            (*ours, "address", "add", "198.51.100.1/24", "dev", "cable0"),
            (*theirs, "address", "add", "198.51.100.2/24", "dev", "cable1"),
            (*ours, "link", "set", "cable0", "up"),
            (*theirs, "link", "set", "cable1", "up"),
            (*theirs, "link", "set", "lo", "up"),
            (*theirs, "route", "add", "default", "via", "198.51.100.1"),  # an answer would find its way back
        ):
            subprocess.run(command, check=True)
        yield "198.51.100.2", 8080
    finally:
        server.kill()
        server.wait()


def address_of(docker_directory: Path, box: Sandbox) -> str:
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return docker(docker_directory, "inspect", "--format", form, box.id).stdout.decode().strip()


async def reaches(box: Sandbox, address: str, port: int) -> bool:
    """Whether it gets an answer to an HTTP request."""
    request = f"import urllib.request as u; u.urlopen('http://{address}:{port}/', timeout=10).read()"
    return (await box.exec(f'/opt/ratchet/bin/python3 -c "{request}"', check=False, timeout=90)).exit_code == 0


async def test_a_box_reaches_the_adapter_and_neither_the_world_nor_another_box(
    docker_directory: Path, docker_pid: int, bridge_address: str, provider: DockerProvider, adapter_port: int, outside: tuple[str, int]
) -> None:
    async with await make_box(provider) as box, await make_box(provider) as other:
        await other.exec("cd /srv && (setsid /opt/ratchet/bin/python3 -m http.server 8080 >/dev/null 2>&1 &)")

        async def serves() -> bool:
            return await reaches(other, "127.0.0.1", 8080)

        await eventually(serves, 120)
        with relay(docker_pid, bridge_address, adapter_port):
            assert await reaches(box, bridge_address, adapter_port)
        assert not await reaches(box, *outside)
        assert not await reaches(box, address_of(docker_directory, other), 8080)


async def test_the_world_is_there_for_containers_of_other_networks(docker_directory: Path, outside: tuple[str, int]) -> None:
    """Or the test above would show nothing."""
    assert docker(docker_directory, "network", "create", "open").returncode == 0
    request = f"import urllib.request as u; u.urlopen('http://{outside[0]}:{outside[1]}/', timeout=60).read()"
    done = docker(docker_directory, "run", "--rm", "--network", "open", "host", "/opt/ratchet/bin/python3", "-c", request)
    assert done.returncode == 0, done.stderr


async def test_a_network_that_is_missing_is_made_closed(docker_directory: Path) -> None:
    """Who forgets to make it gets the same."""
    own = DockerProvider(f"unix://{docker_directory}/docker.sock", network="made-by-us")
    async with await make_box(own):
        form = '{{.Internal}} {{index .Options "com.docker.network.bridge.enable_icc"}}'
        facts = docker(docker_directory, "network", "inspect", "--format", form, "made-by-us").stdout.decode()
    await own.close()
    assert facts.strip() == "true false"


async def test_an_image_that_docker_saves_is_one_that_we_import(docker_directory: Path, tmp_path: Path) -> None:
    """What `docker save` really writes, with a layer that docker made."""
    from ratchet.local.sandbox_gateway.image_store import ImageStore

    made = docker(docker_directory, "create", "--name", "changed", "host:latest", "/bin/bash", "-c", "rm /workspace -r; echo x > /srv/new")
    assert made.returncode == 0, made.stderr
    assert docker(docker_directory, "start", "-a", "changed").returncode == 0
    change = ["--change", "ENV A=b", "--change", "WORKDIR /srv", "--change", "USER agent"]
    assert docker(docker_directory, "commit", *change, "changed", "team/changed:1").returncode == 0
    source = tmp_path / "saved.tar"
    assert docker(docker_directory, "save", "-o", str(source), "team/changed:1").returncode == 0
    image = ImageStore(tmp_path / "images").add(source, None, print)
    assert (image.reference, image.workdir, image.user, image.env["A"]) == ("team/changed:1", "/srv", "agent", "b")
    rootfs = image.directory / "rootfs"
    assert (rootfs / "srv" / "new").read_text() == "x\n" and not (rootfs / "workspace").exists()
    subprocess.run([str(rootfs / "bin" / "true")], check=True)
