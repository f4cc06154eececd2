"""The sandbox contract over a real Docker daemon, and what only this back end has to show."""

import subprocess
import uuid
from pathlib import Path

import pytest

from activities.sandboxes.base import Sandbox
from activities.sandboxes.docker import DockerProvider
from ratchet.errors import SandboxBusyError
from tests.e2e.sandboxes.conftest import docker
from tests.integration.sandboxes.conftest import make_box
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


async def test_the_boxes_network_is_internal(docker_directory: Path, provider: DockerProvider, box: Sandbox) -> None:
    name = docker(docker_directory, "inspect", "--format", "{{.HostConfig.NetworkMode}}", box.id).stdout.decode().strip()
    form = '{{.Internal}} {{index .Options "com.docker.network.bridge.enable_icc"}}'
    facts = docker(docker_directory, "network", "inspect", "--format", form, name).stdout.decode()
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
