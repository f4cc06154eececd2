"""Weights broadcast to scripted engines. A group of sockets stands in for NCCL.

Tested is everything around the bytes: the members of the group, that nothing is sent before every engine waits for
it, and the state after a failure.
"""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import func, insert, update
from temporalio.testing import ActivityEnvironment

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from engine.policy_files import file_sha256
from ratchet.payloads import SyncInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState, policy_version
from stack.ports import free_port
from store import engines, learners, runs
from store.database import Database
from store.schema import EngineTable, PolicyVersionTable, RunTable
from tests.integration.training.records import make_config, make_run
from training.weight_broadcast import WeightBroadcast, describe_tensors

CANARY = {"ids": [5, 6, 7], "logprobs": [-1.0, -2.0]}
TENSORS = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.ones(4)}
DESCRIBED = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[4], [2, 3]]}


class SocketGroup:
    """Opens once all engines have connected; `broadcast` asserts that all of them are paused, and releases them."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.opened: list[int] = []
        self.sent: list[tuple[Path, ...]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def open(self, address: str, port: int, world_size: int) -> None:
        with socket.create_server((address, port)) as server:
            for _ in range((world_size - 1) // 2):
                server.accept()[0].close()
        self.opened.append(world_size)

    def broadcast(self, files: Sequence[Path]) -> None:
        self.sent.append(tuple(files))
        with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
            assert all(client.get(f"{address}/is_paused").json()["is_paused"] for address in self.addresses)
            self.may_end.wait()
            for address in self.addresses:
                client.post(f"{address}/release", json={"hold": "group"})

    def close(self) -> None:
        """Nothing is open."""


class Engines:
    """A run with published steps, and two engines that serve step 0."""

    def __init__(self, database: Database, run_id: str, root: Path) -> None:
        self.database = database
        self.run_id = run_id
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses: list[str] = []
        self.ids: list[int] = []

    async def publish(self, step: int) -> PolicyVersionTable:
        directory = self.root / "policies" / self.run_id / f"{step}.e1"
        directory.mkdir(parents=True)
        save_file(TENSORS, directory / "model.safetensors")
        files = [{"name": "model.safetensors", "sha256": file_sha256(directory / "model.safetensors"), "bytes": 1}]
        row = {
            "version": policy_version(self.run_id, step, 1),
            "run_id": self.run_id,
            "step": step,
            "epoch": 1,
            "uri": str(directory),
        }
        async with self.database.begin() as connection:
            await connection.execute(insert(PolicyVersionTable).values(**row, files=files, canary=CANARY))
            version = await runs.newest_version(connection, self.run_id, step)
        assert version is not None
        return version

    async def add(self) -> None:
        port = free_port()
        self.processes.append(subprocess.Popen([sys.executable, "-m", "tests.standins.engine", str(port)]))
        self.addresses.append(f"http://127.0.0.1:{port}")
        async with asyncio.timeout(300):
            while True:
                try:
                    await self.ask(-1, "POST", "/script", {"scores": CANARY["logprobs"]})
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        async with self.database.begin() as connection:
            engine_id = await engines.register_engine(connection, self.addresses[-1], "", {"started_at": 1.0})
            serving = {"state": EngineState.READY, "version": policy_version(self.run_id, 0, 1)}
            serving["heartbeat_at"] = func.now() + timedelta(hours=1)  # no wrapper sends heartbeats here
            await connection.execute(update(EngineTable).where(EngineTable.id == engine_id).values(**serving))
        self.ids.append(engine_id)
        await self.ask(-1, "POST", "/update_weight_version", {"new_version": serving["version"]})

    async def ask(self, number: int, method: str, path: str, body: Any = None) -> Any:
        async with httpx.AsyncClient(
            base_url=self.addresses[number], trust_env=False, verify=False, timeout=60
        ) as client:
            reply = await client.request(method, path, json=body)
            return reply.json() if reply.content else None

    async def seen(self, number: int, name: str) -> Any:
        return (await self.ask(number, "GET", "/calls"))[name]

    async def rows(self) -> list[tuple[EngineState, str | None]]:
        async with self.database.begin() as connection:
            found = [await engines.get_engine(connection, engine_id) for engine_id in self.ids]
        return [(row.state, row.version) for row in found if row is not None]


@pytest.fixture
async def two(
    database: Database, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engines]:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await connection.execute(update(EngineTable).values(state=EngineState.GONE))
    found = Engines(database, run_id, tmp_path)
    try:
        await found.add()
        await found.add()
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


async def test_all_engines_get_the_weights_by_one_broadcast(two: Engines) -> None:
    """The group is kept for the next version; a version that engines have already is not sent again."""
    group = SocketGroup(two.addresses)
    push = WeightBroadcast(group, two.root / "policies")
    for step in (1, 2):
        version = await two.publish(step)
        await push.send(two.database, version, keep_cache=False)
        await push.send(two.database, version, keep_cache=False)
        assert await two.rows() == [(EngineState.READY, version.version)] * 2
        assert group.sent[step - 1 :] == [(Path(version.uri) / "model.safetensors",)]
        for number in (0, 1):
            assert (await two.seen(number, "updates"))[-1] == DESCRIBED
            assert not (await two.ask(number, "GET", "/is_paused"))["is_paused"]
    assert group.opened == [5]
    ranks = [await two.seen(number, "group") for number in (0, 1)]
    assert [(one["rank_offset"], one["world_size"], one["packed"]) for one in ranks] == [(1, 5, True), (3, 5, True)]


async def test_a_restarted_engine_joins_a_new_group(two: Engines) -> None:
    group = SocketGroup(two.addresses)
    push = WeightBroadcast(group, two.root / "policies")
    await push.send(two.database, await two.publish(1), keep_cache=False)
    async with two.database.begin() as connection:
        await connection.execute(
            update(EngineTable).where(EngineTable.id == two.ids[0]).values(details={"started_at": 2.0})
        )
    await push.send(two.database, await two.publish(2), keep_cache=False)
    assert group.opened == [5, 5] and len(group.sent) == 2


async def test_if_one_engine_fails_nothing_is_sent_and_the_others_read_the_files(two: Engines) -> None:
    group = SocketGroup(two.addresses)
    push = WeightBroadcast(group, two.root / "policies")
    await push.send(two.database, await two.publish(1), keep_cache=False)
    version = await two.publish(2)
    await two.ask(0, "POST", "/script", {"pause": "die"})
    await push.send(two.database, version, keep_cache=False)
    assert len(group.sent) == 1 and not push.given_up
    assert (await two.rows())[0][0] is EngineState.SYNCING, "its pause lapses, or its wrapper marks it as gone"
    assert (await two.rows())[1] == (EngineState.READY, version.version)
    (file,) = version.files
    read = {"files": [f"{two.run_id}/2.e1/model.safetensors"], "sha256": [file["sha256"]], "slot": 1}
    assert (await two.seen(1, "updates"))[-1] == read


async def test_a_group_that_fails_is_not_tried_again_and_no_engine_is_paused(two: Engines) -> None:
    class Unreachable(SocketGroup):
        def open(self, address: str, port: int, world_size: int) -> None:
            super().open(address, port, world_size)  # releases the engines
            raise OSError("no route")

    group = Unreachable(two.addresses)
    push = WeightBroadcast(group, two.root / "policies")
    for step in (1, 2):
        await push.send(two.database, await two.publish(step), keep_cache=False)
    assert group.opened == [5] and group.sent == []
    assert [await two.seen(number, "pauses") for number in (0, 1)] == [[], []]
    assert {state for state, _ in await two.rows()} == {EngineState.READY}


async def test_an_engine_that_does_not_answer_does_not_stop_the_others(two: Engines) -> None:
    """It died so recently that its row is still `ready`."""
    two.processes[0].kill()
    two.processes[0].wait()
    group = SocketGroup(two.addresses[1:])
    version = await two.publish(1)
    await WeightBroadcast(group, two.root / "policies").send(two.database, version, keep_cache=False)
    assert group.opened == [3] and len(group.sent) == 1
    assert await two.rows() == [
        (EngineState.READY, policy_version(two.run_id, 0, 1)),
        (EngineState.READY, version.version),
    ]


@pytest.mark.parametrize("ending", ["hangs", "refuse", "die"])
async def test_a_broadcast_that_does_not_end_is_abandoned_and_resumes_no_engine(
    two: Engines, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """If an engine fails in a broadcast, NCCL waits for ever: the broadcast is abandoned, and the learner continues."""
    monkeypatch.setattr("training.weight_broadcast._SEND_SECONDS", 5.0 if ending == "hangs" else 60.0)
    monkeypatch.setattr("training.weight_broadcast._GRACE_SECONDS", 1.0)
    if ending != "hangs":
        await two.ask(0, "POST", "/script", {"update": ending})
    group = SocketGroup(two.addresses[1:])
    group.may_end.clear()
    push = WeightBroadcast(group, two.root / "policies")
    await push.send(two.database, await two.publish(1), keep_cache=False)
    assert push.given_up and len(group.sent) == 1
    assert {state for state, _ in await two.rows()} == {EngineState.SYNCING}
    assert (await two.ask(1, "GET", "/is_paused"))["is_paused"]
    await push.send(two.database, await two.publish(2), keep_cache=False)
    assert len(group.sent) == 1
    group.may_end.set()


async def test_the_sync_waits_for_a_learner_that_still_sends(two: Engines) -> None:
    """Otherwise both would try to take the pause. It does not wait for a learner that is silent or in another phase."""
    asked = asyncio.Semaphore(0)

    class Counted(LearnActivities):
        async def _is_broadcasting(self, input: SyncInput) -> bool:
            asked.release()
            return await super()._is_broadcasting(input)

    version = await two.publish(1)
    config = make_config(training={"weight_transport": "nccl"}).model_dump(mode="json")
    async with two.database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == two.run_id).values(config=config))
        await learners.heartbeat_learner(connection, two.run_id, 1, 1, learners.PUBLISHING, 1, {})
    activities = Counted(two.database, RunConfigs(two.database, load_temporal_settings()))
    syncing = asyncio.create_task(
        ActivityEnvironment().run(activities.sync, SyncInput(run_id=two.run_id, step=1, engine_id=two.ids[0]))
    )
    for _ in range(3):
        await asyncio.wait_for(asked.acquire(), 60)
    assert not syncing.done() and (await two.rows())[0] == (EngineState.READY, policy_version(two.run_id, 0, 1))
    async with two.database.begin() as connection:
        await learners.heartbeat_learner(connection, two.run_id, 1, 1, "waiting for a plan", 2, {})
    await syncing
    assert (await two.rows())[0] == (EngineState.READY, version.version)


def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    save_file({"table": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="table has dtype I64"):
        describe_tensors([tmp_path / "model.safetensors"])
