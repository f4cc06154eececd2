"""`ratchet launch` over two hosts: the services and boxes on one, the engine on the other, the cable cut in mid-run.

The hosts are network namespaces, each with its own address; the second one has a real sshd, and Postgres listens on the
first one's address. Skipped without root, iproute2 or openssh-server.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from sqlalchemy import select

from ratchet.store.database import Database
from ratchet.store.schema import BatchItemTable, BatchTable, RolloutTable, RunTable
from stack.ports import free_port
from tests.e2e.conftest import ROOT
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


def write_files(home: Path, config_path: Path, worker: NetworkHost, cluster: dict[str, object]) -> tuple[str, str]:
    config = yaml.safe_load(config_path.read_text())
    config["training"] |= {"steps": STEPS, "group_size": GROUP_SIZE, "checkpoint_every": 1}
    config["engines"] = [{"host": worker.address}]
    (home / "fleet.yaml").write_text(yaml.safe_dump(config))
    (home / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return str(home / "cluster.yaml"), str(home / "fleet.yaml")


def eventually(holds: Callable[[], bool], launch: "subprocess.Popen[bytes]", log: Path, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert launch.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
        time.sleep(0.5)


def processes_with(*words: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(word in line for word in words):
            found.append(line)
    return found


def test_a_launch_over_two_hosts_survives_a_cut_cable(
    hosts: tuple[NetworkHost, NetworkHost], database_url: str, home: Path, config_path: Path
) -> None:
    head, worker = hosts
    bystander = subprocess.Popen(worker.inside("sleep", "100000"), start_new_session=True)
    port, log, stamp = free_port(), home / "launch.out", "twohosts"
    with ssh_server([worker.address], 22, worker.inside()) as ssh:
        cluster = {"head": head.address, "hosts": {worker.address: {"gpus": 0}}, "ssh": list(ssh), "port": port}
        names = write_files(home, config_path, worker, cluster | {"user": "root"})
        command = head.inside(str(ROOT / ".venv/bin/ratchet"), "launch", names[0], "--config", names[1])
        variables = {"RATCHET_DATABASE_URL": database_url, "ADAPTER_PUBLIC_HOST": head.address}
        variables |= {"RATCHET_HOME": str(home / "state"), "STAMP": stamp, "EXP_TAG": home.name}
        with log.open("wb") as output:
            launch = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            eventually(lambda: "step 1:" in log.read_text(), launch, log)
            worker.cut()
            time.sleep(CUT_SECONDS)  # the length of the cut
            worker.mend()
            launch.wait(900)
        finally:
            if launch.poll() is None:
                launch.send_signal(signal.SIGTERM)
                launch.wait(300)
    assert launch.returncode == 0, log.read_text()[-4000:]
    left = processes_with(str(home / "state"), f"{head.address}:{port}", f"ratchet-ray-{os.getuid()}-{port}")
    assert left == [], "everything that the launch has started has ended"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    output_directory = ROOT / "runs" / f"{home.name}_{stamp}"
    dumped = {path.stem for path in (output_directory / "rollout_dumps").iterdir()}
    said = (output_directory / "run.log").read_text()
    assert f"the Ray node of {worker.address} has ended" in said and "engine answers again" in said
    shutil.rmtree(output_directory)
    asyncio.run(require_nothing_lost(database_url, dumped))


async def require_nothing_lost(database_url: str, dumped: set[str]) -> None:
    """Every step was committed once, from whole groups; no member counts twice, and every graded one was dumped."""
    async with Database(database_url, pool_size=1) as database, database.begin() as connection:
        run = (await connection.execute(select(RunTable.state, RunTable.step))).one()
        batches = (await connection.execute(select(BatchTable.step, BatchTable.state))).all()
        used = (await connection.execute(select(BatchItemTable.group_id))).scalars().all()
        rollouts = (await connection.execute(select(RolloutTable.__table__))).mappings().all()
    assert tuple(run) == ("done", STEPS)
    assert {tuple(batch) for batch in batches} == {(step, "committed") for step in range(1, STEPS + 1)}
    kept = Counter((one["group_id"], one["member"]) for one in rollouts if one["replaced_by"] is None)
    assert set(kept.values()) == {1}
    graded = [one for one in rollouts if one["outcome"] == "graded"]
    assert Counter(one["group_id"] for one in graded if one["group_id"] in used) == dict.fromkeys(used, GROUP_SIZE)
    assert [one["outcome_reason"] for one in rollouts if one["outcome"] not in ("graded", "cancelled")] == []
    assert {f"rollout_{one['id']}" for one in graded} == dumped
