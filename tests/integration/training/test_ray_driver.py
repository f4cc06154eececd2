"""The learner service on a real Ray cluster: a process that dies is replaced or gone, and the run is trained once."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select

from stack.ports import free_port
from store import learners
from store.database import Database
from store.learners import LearnerRow
from store.schema import BatchItemTable
from tests.integration.training.records import make_config, make_group, make_run, plan_ahead, states

DEADLINE_SECONDS = 900.0
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray uses the machine's own address instead of 127.0.0.1
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a minute each on idle cores


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"it did not come true in time: {what}") from None


@dataclass
class Head:
    address: str
    process: "subprocess.Popen[bytes]"

    def descendants(self) -> list[str]:
        """Return the command lines of the actors of Ray Train on this node."""
        parents, titles = {}, {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    titles[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue  # it has just ended

        def is_ours(pid: int) -> bool:
            while pid in parents and pid != self.process.pid:
                pid = parents[pid]
            return pid == self.process.pid

        actors = ("ray::RayTrainWorker", "ray::TrainController", "ray::SynchronizationActor")
        return [title for pid, title in titles.items() if title.startswith(actors) and is_ours(pid)]


def _start(directory: Path, num_cpus: int, host: str = "127.0.0.1", head: Head | None = None) -> Head | None:
    """Start a head, or another node of its cluster; return None if it did not come up.

    Ray gives its own processes half a minute to start, which can be too short on a busy machine.
    """
    port = free_port()
    program = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        f"--node-ip-address={host}",
        f"--num-cpus={num_cpus}",
    ]
    if head is None:
        program += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"]
        program += [f"--ray-client-server-port={free_port()}"]
    else:
        program += [f"--address={head.address}"]
    program += [
        f"--object-store-memory={80 << 20}",
        f"--dashboard-agent-listen-port={free_port()}",
        "--disable-usage-stats",
    ]
    program += ["--min-worker-port=0", "--max-worker-port=0"]
    environment = {
        **os.environ,
        **(ON_LOOPBACK if head is None else {}),
        "RAY_worker_niceness": "0",
        "PYTHONUNBUFFERED": "1",
    }
    log = directory / ("head.log" if head is None else "node.log")
    with log.open("wb") as output:
        # In its own process group: a head that fails to start ends its whole group.
        process = subprocess.Popen(
            program, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    while process.poll() is None:
        if "Ray runtime started" in log.read_text():
            return Head(f"{host}:{port}" if head is None else head.address, process)
        time.sleep(0.1)
    return None


def _three_times(start: Callable[[], Head | None], log: Path) -> Head:
    found = start() or start() or start()
    assert found is not None, log.read_text()
    return found


def _end(node: Head) -> None:
    os.killpg(node.process.pid, signal.SIGKILL)  # SIGTERM takes half a minute
    node.process.wait()


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A private cluster on loopback. The path of its directory is short, because unix sockets need that."""
    directory = Path(tempfile.mkdtemp(prefix="ray"))
    head = _three_times(lambda: _start(directory, 2), directory / "head.log")
    yield head
    _end(head)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def two_nodes() -> Iterator[tuple[Head, Head]]:
    """A cluster of two nodes with room for one rank each, on addresses that Ray does not recognise as loopback.

    Ray refuses nodes on addresses that it recognises as loopback.
    """
    directory = Path(tempfile.mkdtemp(prefix="ray"))
    head = _three_times(lambda: _start(directory, 1, "127.0.0.2"), directory / "head.log")
    node = _three_times(lambda: _start(directory, 1, "127.0.0.3", head), directory / "node.log")
    yield head, node
    for one in (node, head):
        _end(one)
    shutil.rmtree(directory, ignore_errors=True)


class Service:
    """The learner service in a process of its own."""

    def __init__(self, database: Database, head: Head, home: Path, run_id: str) -> None:
        self.database = database
        self.head = head
        self.home = home
        self.run_id = run_id
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        program = (
            "import asyncio, sys; from training.service import run_learner_service; "
            "asyncio.run(run_learner_service(sys.argv[1]))"
        )
        environment = {**os.environ, **ON_LOOPBACK, "RATCHET_HOME": str(self.home), "RAY_ADDRESS": self.head.address}
        users = self.home / "working-directory"  # its modules must not hide ours, neither here nor in the ranks
        users.mkdir(exist_ok=True)
        for name in ("training", "engine", "ratchet"):
            (users / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", program, self.database.url, env=environment, cwd=users
        )

    async def ready(self, epoch: int) -> LearnerRow:
        async def holds() -> bool:
            async with self.database.begin() as connection:
                row = await learners.get_learner(connection, self.run_id)
            return row is not None and row.epoch == epoch and row.phase == "waiting for a plan"

        await eventually(holds, f"the learner of epoch {epoch} is ready")
        async with self.database.begin() as connection:
            row = await learners.get_learner(connection, self.run_id)
        assert row is not None
        return row

    async def nothing_left(self) -> None:
        async def holds() -> bool:
            return not self.head.descendants()

        await eventually(holds, "no rank and no controller is left")


@pytest.fixture
async def service(database: Database, head: Head, tmp_path: Path, run_id: str) -> AsyncIterator[Service]:
    service = Service(database, head, tmp_path, run_id)
    yield service
    if service.process is not None and service.process.returncode is None:
        service.process.kill()
        await service.process.wait()


async def test_the_life_of_a_learner(service: Service, database: Database, model: Path) -> None:
    config = make_config(training={"workers": 2, "steps": 4})
    run_id = service.run_id
    await make_run(database, run_id, config, model, service.home / "policies")

    await service.start()
    first = await service.ready(1)
    os.kill(first.details["pid"], 9)
    second = await service.ready(2)  # Ray restarts the whole group, which takes a new lease
    assert second.details["pid"] != first.details["pid"] and second.world_size == 2

    assert service.process is not None
    service.process.kill()  # its driver dies with it, and the ranks with the job of the driver
    await service.nothing_left()

    await service.start()
    await service.ready(3)
    assert service.process is not None
    service.process.terminate()
    assert await service.process.wait() == 0
    await service.nothing_left()

    await service.start()
    await service.ready(4)
    async with database.begin() as connection:
        for number in range(8):
            await make_group(connection, run_id, number, [1.0, 0.0, 0.0, 1.0])
    await plan_ahead(database, run_id, config)

    async def committed() -> bool:
        return set(await states(database, run_id)) == {"committed"}

    await eventually(committed, "all steps are committed")
    await service.nothing_left()  # the driver ends by itself, and the service continues
    assert service.process is not None and service.process.returncode is None
    service.process.terminate()
    assert await service.process.wait() == 0
    async with database.begin() as connection:
        groups = list(
            (await connection.execute(select(BatchItemTable.group_id).where(BatchItemTable.run_id == run_id))).scalars()
        )
        assert run_id not in await learners.runs_wanting_learner(connection)
    assert len(groups) == len(set(groups)) == 8


async def test_the_learners_of_two_runs_fit_on_one_node(service: Service, database: Database, model: Path) -> None:
    """Four ranks on a node that says that it has two CPUs."""
    other = Service(database, service.head, service.home, f"{service.run_id}-other")
    for one, name in ((service, "default"), (other, "b")):
        config = make_config(training={"workers": 2, "steps": 4}, engine_set=name)
        await make_run(database, one.run_id, config, model, service.home / "policies")
    await service.start()
    assert [(await one.ready(1)).world_size for one in (service, other)] == [2, 2]


async def test_ranks_on_two_nodes(
    two_nodes: tuple[Head, Head], database: Database, tmp_path: Path, run_id: str, model: Path
) -> None:
    """Each node holds one rank, and together they train the run."""
    config = make_config(training={"workers": 2, "steps": 2})
    await make_run(database, run_id, config, model, tmp_path / "policies")
    service = Service(database, two_nodes[0], tmp_path, run_id)
    await service.start()
    try:
        assert (await service.ready(1)).world_size == 2
        assert [sum("RayTrainWorker" in title for title in one.descendants()) for one in two_nodes] == [1, 1]
        async with database.begin() as connection:
            for number in range(4):
                await make_group(connection, run_id, number, [1.0, 0.0, 0.0, 1.0])
        await plan_ahead(database, run_id, config)

        async def committed() -> bool:
            return set(await states(database, run_id)) == {"committed"}

        await eventually(committed, "all steps are committed")
    finally:
        assert service.process is not None
        service.process.terminate()
        await service.process.wait()
