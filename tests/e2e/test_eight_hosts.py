"""`ratchet launch` over eight hosts: one command starts Ray's nodes, registers an engine on each, and ends all of it.

The hosts are network namespaces. Their engines are scripted, and run before the launch, as servers of somebody else do.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from tokenizers import Tokenizer

from stack.ports import free_port
from store.database import Database
from store.schema import EngineTable, RolloutTable, RunTable
from tests.e2e.conftest import ROOT
from tests.e2e.launch_process import Launch, evaluation_config, launching, processes_with
from tests.network_hosts import NetworkHost, network_hosts, ssh_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_HOSTS, NUM_ROLLOUTS, PORT = 8, 32, 8000
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
def hosts() -> Iterator[list[NetworkHost]]:
    with network_hosts(1 + NUM_HOSTS) as found:
        yield found


@pytest.fixture
def database_url(hosts: list[NetworkHost], home: Path) -> Iterator[str]:
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


@pytest.fixture
def engines(hosts: list[NetworkHost], tiny_policy: Path) -> Iterator[list[str]]:
    """Addresses of the engines, one per host, each of which can answer every call of the run."""
    tokenizer = Tokenizer.from_file(str(tiny_policy / "tokenizer.json"))
    ids = [*tokenizer.encode("I give up.", add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]
    addresses = [f"http://{host.address}:{PORT}" for host in hosts[1:]]
    with contextlib.ExitStack() as running:
        for host in hosts[1:]:
            command = host.inside(sys.executable, "-m", "tests.standins.engine", str(PORT), host.address)
            process = subprocess.Popen(command, cwd=ROOT)
            running.callback(process.wait)
            running.callback(process.kill)
        with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=9), timeout=60) as http:
            for address in addresses:
                http.post(f"{address}/script", json={"outputs": [{"ids": ids}] * 2 * NUM_ROLLOUTS}).raise_for_status()
        yield addresses


def seconds_at(launch: Launch, text: str) -> float:
    """Return when the launch said a text for the first time, in seconds since its start."""
    (found,) = re.findall(rf"^\[ *([\d.]+) s\] .*{re.escape(text)}", launch.said(), re.M)[:1]
    return float(found)


def test_eight_hosts_start_and_end_by_one_command(
    hosts: list[NetworkHost], engines: list[str], database_url: str, home: Path, config_path: Path
) -> None:
    head, *others = hosts
    port = free_port()
    variables = {"RATCHET_DATABASE_URL": database_url, "ADAPTER_PUBLIC_HOST": head.address}
    # Ray's nodes look for free names of sockets in their session's directory, which several hosts do not share.
    sockets = Path(f"/tmp/ratchet-ray-{os.getuid()}-{port}")
    prefixes = [host.inside_with_own(sockets) for host in others]
    with ssh_server([host.address for host in others], 22, prefixes) as ssh:
        before = {host.address: sorted(host.commands()) for host in others}
        nodes = {host.address: {"gpus": 0} for host in others}
        cluster = {"head": head.address, "hosts": nodes, "ssh": list(ssh), "user": "root", "port": port}
        config = evaluation_config(config_path, home, NUM_ROLLOUTS, *engines)
        with launching(home / "eight", head, cluster, config, variables) as launch:
            launch.wait_done(1500)
            assert f"with {1 + NUM_HOSTS} nodes" in launch.said()
            ray, stack = seconds_at(launch, "Ray is up"), seconds_at(launch, "every part answers")
            done = max(path.stat().st_mtime for path in (launch.directory / "rollout_dumps").iterdir())
            end = time.time() - done
            dumped = launch.dumped()
        assert {host.address: sorted(host.commands()) for host in others} == before, "nothing is left on a host"
    assert processes_with(str(home / "eight"), f"{head.address}:{port}", f"ratchet-ray-{os.getuid()}-{port}") == []
    print(f"Ray's nodes were up after {ray:.0f} s, every part after {stack:.0f} s; {launch.seconds:.0f} s in all, the")
    print(f"last {end:.0f} s of them after the last rollout")
    calls = [len(httpx.get(f"{one}/calls", trust_env=False, timeout=60).json()["calls"]) for one in engines]
    assert sum(calls) >= NUM_ROLLOUTS and sum(count > 0 for count in calls) > 1, calls
    asyncio.run(require_whole(database_url, engines, dumped))


async def require_whole(database_url: str, engines: list[str], dumped: dict[str, set[int]]) -> None:
    async with Database(database_url, pool_size=1) as database, database.begin() as connection:
        known = (await connection.execute(select(EngineTable.address, EngineTable.state))).all()
        assert (await connection.execute(select(RunTable.state))).scalar_one() == "done"
        rollouts = (await connection.execute(select(RolloutTable.id, RolloutTable.outcome))).all()
    assert sorted(tuple(row) for row in known) == sorted((address, "gone") for address in engines)
    assert Counter(row.outcome for row in rollouts) == {"graded": len(rollouts)}
    assert dumped == {"rollout_eval_0": {row.id for row in rollouts}}
