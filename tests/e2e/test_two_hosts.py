"""`ratchet launch` over two hosts, the cable cut in mid-run: the engine on the other host, or all boxes and a worker.

The hosts are network namespaces, each with its own address; the second one has a real sshd, and Postgres listens on the
first one's address if the engine is there. Skipped without root, iproute2 or openssh-server.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stack.parts import Stack
from stack.ports import free_port
from stack.postgres import database_url as own_database_url
from stack.postgres import embedded_server
from store.database import Database
from tests.e2e.launch_process import launching, processes_with, require_nothing_lost
from tests.network_hosts import NetworkHost, network_hosts, ssh_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, GROUP_SIZE, CUT_SECONDS = 4, 4, 60.0
POSTGRES = """
import os, pathlib, pwd, sys
from stack.postgres import initialise
data, address = pathlib.Path(sys.argv[1]), sys.argv[2]
program = str(initialise(data) / "postgres")
with (data / "pg_hba.conf").open("a") as file:
    file.write("host all all 10.77.0.0/16 trust\\n")
user = pwd.getpwnam("pgserver")
os.setgroups([]), os.setgid(user.pw_gid), os.setuid(user.pw_uid), os.chdir("/")
os.execv(program, [program, "-D", str(data), "-h", address, "-p", "5432", "-k", "", "-c", "max_connections=200"])
"""


@pytest.fixture
def hosts() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    with network_hosts(2) as (head, worker):
        yield head, worker


@pytest.fixture
def bystander(hosts: tuple[NetworkHost, NetworkHost]) -> "Iterator[subprocess.Popen[bytes]]":
    """A process of the other host that no launch may touch."""
    process = subprocess.Popen(hosts[1].inside("sleep", "100000"), start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def database_url(hosts: tuple[NetworkHost, NetworkHost], home: Path) -> Iterator[str]:
    """A Postgres that both hosts reach."""
    import asyncpg

    address = hosts[0].address
    command = hosts[0].inside(sys.executable, "-P", "-c", POSTGRES, str(home / "postgres"), address)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def create() -> None:
        async with Database(f"postgresql://postgres@{address}/postgres", pool_size=1) as admin:
            await admin.wait(300)
        connection = await asyncpg.connect(f"postgresql://postgres@{address}/postgres")
        await connection.execute("CREATE DATABASE ratchet")
        await connection.close()

    try:
        asyncio.run(create())
        yield f"postgresql://postgres@{address}/ratchet"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def config_of(path: Path, **values: object) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config["training"] |= {"steps": STEPS, "group_size": GROUP_SIZE, "checkpoint_every": 1}
    return config | values


def test_the_engine_on_the_other_host(
    hosts: tuple[NetworkHost, NetworkHost],
    bystander: "subprocess.Popen[bytes]",
    database_url: str,
    home: Path,
    config_path: Path,
) -> None:
    head, worker = hosts
    port = free_port()
    config = config_of(config_path, engines=[{"host": worker.address}])
    variables = {"RATCHET_DATABASE_URL": database_url, "ADAPTER_PUBLIC_HOST": head.address}
    with ssh_server([worker.address], 22, [worker.inside()]) as ssh:
        cluster = {"head": head.address, "hosts": {worker.address: {"gpus": 0}}, "ssh": list(ssh), "port": port}
        with launching(home / "engine", head, cluster | {"user": "root"}, config, variables) as launch:
            launch.until(lambda: "step 1:" in launch.said())
            worker.cut()
            time.sleep(CUT_SECONDS)  # the length of the cut
            worker.mend()
            launch.wait_done()
            said, dumped = (launch.directory / "run.log").read_text(), launch.dumped()
    left = processes_with(str(home / "engine"), f"{head.address}:{port}", f"ratchet-ray-{os.getuid()}-{port}")
    assert left == [], "everything that the launch has started has ended"
    assert bystander.poll() is None
    assert f"the Ray node of {worker.address} has ended" in said and "engine answers again" in said
    asyncio.run(require_nothing_lost(database_url, dumped, STEPS, GROUP_SIZE))


def test_boxes_and_a_worker_on_the_other_host(
    hosts: tuple[NetworkHost, NetworkHost], bystander: "subprocess.Popen[bytes]", home: Path, config_path: Path
) -> None:
    """Postgres and Temporal are those of the stack, on loopback; ssh joins the ports."""
    head, worker = hosts
    with ssh_server([worker.address], 22, [worker.inside()]) as ssh:
        idle = worker.commands()
        cluster = {"head": head.address, "hosts": {worker.address: {"boxes": True}}, "ssh": list(ssh), "user": "root"}
        with launching(home / "boxes", head, cluster, config_of(config_path), {}) as launch:
            launch.until(lambda: "step 1:" in launch.said())
            there = worker.commands()
            for part in ("ratchet part gateway", "ratchet part worker --queue=boot --queue=agent --queue=grade"):
                assert any(line.endswith(part) for line in there), there
            assert not any(line.endswith(" gateway") for line in head.commands())
            worker.cut()
            time.sleep(CUT_SECONDS)  # the length of the cut
            worker.mend()
            launch.wait_done()
            dumped = launch.dumped()
            assert "worker ready" in (launch.directory / "worker.log").read_text()
        assert sorted(worker.commands()) == sorted(idle), "everything that the launch has started has ended"
    assert processes_with(str(home / "boxes")) == []
    assert bystander.poll() is None
    state = home / "boxes" / "state"
    port = Stack(state).ports["postgres"]
    with embedded_server(state / "postgres", port):
        asyncio.run(require_nothing_lost(own_database_url(port), dumped, STEPS, GROUP_SIZE))
