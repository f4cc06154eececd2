"""`ratchet launch` with two hosts of boxes, one of which is killed in mid-run with all that runs there.

The hosts are network namespaces. The engine is scripted, and holds the first answers of the run until the host is dead.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import select
from tokenizers import Tokenizer

from sandbox_gateway.box_end import kill_processes, living_boxes
from sandbox_gateway.front import host_tag
from stack.parts import Stack
from stack.postgres import database_url as own_database_url
from stack.postgres import embedded_server
from store.database import Database
from store.schema import RolloutTable, RunTable, SandboxTable
from tests.e2e.conftest import ROOT
from tests.e2e.launch_process import evaluation_config, launching
from tests.network_hosts import NetworkHost, network_hosts, ssh_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_ROLLOUTS, NUM_HELD, PORT = 12, 8, 8000


@pytest.fixture
def hosts() -> Iterator[list[NetworkHost]]:
    with network_hosts(3) as found:
        yield found


@pytest.fixture
def engine(hosts: list[NetworkHost]) -> Iterator[httpx.Client]:
    """An engine on the head, whose answers are still without a script."""
    head = hosts[0]
    process = subprocess.Popen(
        head.inside(sys.executable, "-m", "tests.standins.engine", str(PORT), head.address), cwd=ROOT
    )
    try:
        url, way = f"http://{head.address}:{PORT}", httpx.HTTPTransport(retries=9)
        with httpx.Client(base_url=url, trust_env=False, transport=way, timeout=60) as http:
            yield http
    finally:
        process.kill()
        process.wait()


def hold_answers(engine: httpx.Client, policy: Path) -> int:
    """Script an answer for every rollout, the first NUM_HELD of which wait; return the number of calls before."""
    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    ids = [*tokenizer.encode("I give up.", add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]
    outputs = [{"ids": ids, "hold": "dead"}] * NUM_HELD + [{"ids": ids}] * 4 * NUM_ROLLOUTS
    engine.post("/script", json={"outputs": outputs}).raise_for_status()
    return len(engine.get("/calls").json()["calls"])


def test_no_rollout_is_lost_with_a_host(
    hosts: list[NetworkHost], engine: httpx.Client, home: Path, config_path: Path, tiny_policy: Path
) -> None:
    """Rollouts with boxes on the other host go on; the others are replayed in new boxes."""
    head, *others = hosts
    killed = others[0]
    roots = [home / "hosts" / "state" / "boxes" / one.address for one in others]
    with (
        contextlib.ExitStack() as ended,
        ssh_server([one.address for one in others], 22, [one.inside() for one in others]) as ssh,
    ):
        for root in roots:
            ended.callback(end_boxes, root)  # they outlive a launch that fails
        boxes = {one.address: {"boxes": True} for one in others}
        cluster = {"head": head.address, "hosts": boxes, "ssh": list(ssh), "user": "root", "lost_seconds": 60}
        config = evaluation_config(config_path, home, NUM_ROLLOUTS, str(engine.base_url))
        config["sandbox"] = {"max_boxes": 10}
        with launching(home / "hosts", head, cluster, config, {}) as launch:
            launch.until(lambda: "every part answers" in launch.said(), 900)
            num_calls = hold_answers(engine, tiny_policy)

            def works() -> bool:
                calls = engine.get("/calls").json()["calls"]
                return len(calls) - num_calls >= NUM_HELD and all(living_boxes(root) for root in roots)

            launch.until(works, 900)
            num_killed = len(living_boxes(roots[0]))
            killed.cut()
            for process in killed.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with one that was killed before
                    process.kill()
            end_boxes(roots[0])
            engine.post("/release", json={"hold": "dead"}).raise_for_status()
            launch.wait_done(1200)
            dumped = launch.dumped()
    state = home / "hosts" / "state"
    port = Stack(state).ports["postgres"]
    with embedded_server(state / "postgres", port):
        ids = asyncio.run(require_whole(own_database_url(port), dumped))
    made = Counter(one for box in ids for one in others if box.startswith(f"i{host_tag(one.address)}"))
    print(f"{num_killed} boxes were killed; boxes made on each host: {list(made.values())}; {launch.seconds:.0f} s")
    assert len(made) == 2 and num_killed


def end_boxes(root: Path) -> None:
    for directory in living_boxes(root):
        kill_processes(directory, 30.0)


async def require_whole(database_url: str, dumped: dict[str, set[int]]) -> list[str]:
    """Require that every rollout was graded once; return the ids of all boxes."""
    async with Database(database_url, pool_size=1) as database, database.begin() as connection:
        assert (await connection.execute(select(RunTable.state))).scalar_one() == "done"
        rollouts = (await connection.execute(select(RolloutTable.id, RolloutTable.outcome))).all()
        ids = (await connection.execute(select(SandboxTable.provider_id))).scalars().all()
    assert Counter(row.outcome for row in rollouts) == {"graded": NUM_ROLLOUTS}
    assert dumped == {"rollout_eval_0": {row.id for row in rollouts}}
    return [one for one in ids if one is not None]
