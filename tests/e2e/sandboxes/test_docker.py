"""The sandbox contract on a real Docker daemon, and properties that only this back end has."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.errors import SandboxBusyError
from sandboxes.base import BoxLimits, Sandbox
from sandboxes.docker import DockerProvider
from tests.e2e.sandboxes.conftest import docker, egress
from tests.integration.sandbox_gateway.conftest import ADAPTER_ANSWER, NUM_REPEATS_BIG, eventually, make_box
from tests.integration.sandbox_gateway.contract import *  # noqa: F403

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


async def test_limits_that_a_run_asks_for(docker_directory: Path, provider: DockerProvider) -> None:
    limits = BoxLimits(memory_bytes=96 << 20, num_cpus=0.5, max_processes=100)
    async with await provider.create(
        "host", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex, limits=limits
    ) as box:
        form = "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}}"
        facts = docker(docker_directory, "inspect", "--format", form, box.id).stdout.decode()
        assert facts.strip() == f"{96 << 20} 500000000 100"
        hog = await box.exec("/opt/ratchet/bin/python3 -c 'x = b\"1\" * (300 << 20)'", check=False)
        assert hog.exit_code not in (0, None)
        assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_a_terminal_in_a_container(docker_directory: Path, box: Sandbox) -> None:
    script = (
        "import sys; from cli.admin.box_terminal import run_docker_terminal; "
        "sys.exit(run_docker_terminal(*sys.argv[1:]))"
    )
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
    """A web server on what the daemon sees as another machine: a namespace at the other end of a virtual cable."""
    server = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-m", "http.server", "8080"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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


async def reaches(box: Sandbox, address: str, port: int) -> bool:
    """Return whether an HTTP request from the box gets an answer."""
    request = f"import urllib.request as u; u.urlopen('http://{address}:{port}/', timeout=10).read()"
    return (await box.exec(f'/opt/ratchet/bin/python3 -c "{request}"', check=False, timeout=90)).exit_code == 0


async def interfaces(box: Sandbox) -> list[str]:
    return [line.split(":")[0].strip() for line in (await box.exec("cat /proc/net/dev")).stdout.splitlines()[2:]]


@pytest.fixture(scope="module")
def other_port() -> Iterator[int]:
    """A server on this machine that listens on every address."""
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), http.server.SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


async def test_a_box_reaches_the_adapter_and_nothing_else(
    provider: DockerProvider, adapter_port: int, other_port: int, outside: tuple[str, int]
) -> None:
    """The box reaches no other port of this machine, no other box, no internet and no metadata address, and has only
    its own loopback.
    """
    async with await make_box(provider) as box, await make_box(provider) as other:
        await other.exec("cd /srv && (setsid /opt/ratchet/bin/python3 -m http.server 8080 >/dev/null 2>&1 &)")

        async def serves() -> bool:
            return await reaches(other, "127.0.0.1", 8080)

        await eventually(serves, 120)
        assert await reaches(box, "127.0.0.1", adapter_port)
        assert await interfaces(box) == ["lo"]
        assert (await box.exec("cat /proc/net/route")).stdout.count("\n") <= 1
        for address, port in (
            ("127.0.0.1", other_port),
            ("127.0.0.1", 8080),
            outside,
            ("169.254.169.254", 80),
            ("172.17.0.1", other_port),
        ):
            assert not await reaches(box, address, port), (address, port)
        listeners = (await box.exec("cat /proc/net/tcp /proc/net/tcp6")).stdout
        assert [line.split()[1] for line in listeners.splitlines() if " 0A " in line] == [
            f"0100007F:{adapter_port:04X}"
        ]


async def test_big_answers_and_many_connections_go_through_whole(box: Sandbox, adapter_port: int) -> None:
    url = f"http://127.0.0.1:{adapter_port}"
    script = f"""
import concurrent.futures as c, urllib.request as u
assert u.urlopen('{url}/big').read() == {ADAPTER_ANSWER!r} * {NUM_REPEATS_BIG}
with c.ThreadPoolExecutor(40) as pool:
    assert set(pool.map(lambda _: u.urlopen('{url}/').read(), range(200))) == {{{ADAPTER_ANSWER!r}}}
"""
    await box.write_file("/srv/ask.py", script)
    await box.exec("/opt/ratchet/bin/python3 /srv/ask.py", timeout=300)


async def test_a_box_for_grading_reaches_nothing(provider: DockerProvider, adapter_port: int) -> None:
    closed = await provider.create("host", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex, network=False)
    async with closed:
        assert await interfaces(closed) == ["lo"]
        assert not await reaches(closed, "127.0.0.1", adapter_port)


async def test_an_egress_that_is_killed_finds_its_boxes_again(docker_directory: Path, adapter_port: int) -> None:
    """It finds only its own boxes: those of another installation's adapter have another egress."""
    values = {"ADAPTER_PUBLIC_HOST": "localhost", "ADAPTER_PORT": str(adapter_port)}
    own = DockerProvider(f"unix://{docker_directory}/docker.sock", adapter=f"localhost:{adapter_port}")
    with egress(docker_directory, values):
        box = await make_box(own)
    async with box:
        assert not await reaches(box, "127.0.0.1", adapter_port)
        with egress(docker_directory, values):

            async def reaches_again() -> bool:
                return await reaches(box, "127.0.0.1", adapter_port)

            await eventually(reaches_again)
    await own.close()


async def test_a_box_without_an_egress_is_busy(docker_directory: Path) -> None:
    """The stage tries again and finds the same box."""
    own = DockerProvider(f"unix://{docker_directory}/docker.sock", adapter="127.0.0.1:9", way_seconds=1)
    with pytest.raises(SandboxBusyError, match="ratchet part egress"):
        await make_box(own, key="lonely")
    (info,) = await own.list({"owner": "test"})
    assert info.metadata == {"owner": "test"}
    assert await own.kill(info.id)
    await own.close()


async def test_a_network_of_the_users_own(docker_directory: Path, outside: tuple[str, int]) -> None:
    """A box on a user's network reaches what that network reaches."""
    assert docker(docker_directory, "network", "create", "own").returncode == 0
    own = DockerProvider(f"unix://{docker_directory}/docker.sock", network="own")
    async with await make_box(own) as box:
        assert await reaches(box, *outside)
    await own.close()


async def test_an_image_that_docker_saves_is_one_that_we_import(docker_directory: Path, tmp_path: Path) -> None:
    """The output of a real `docker save`, with a layer that docker made."""
    from sandbox_gateway.image_store import ImageStore

    made = docker(
        docker_directory,
        "create",
        "--name",
        "changed",
        "host:latest",
        "/bin/bash",
        "-c",
        "rm /workspace -r; echo x > /srv/new",
    )
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
