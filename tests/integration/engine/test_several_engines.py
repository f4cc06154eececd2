"""Two engines behind one adapter: one is killed, one joins late, one already runs and is only registered.

Calls go on, a session keeps its engine, and a late engine has the newest weights before it gets its first call.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from engine import weight_storage
from engine.client import EngineClient
from engine.policy_files import describe_files, file_sha256
from engine.process import EngineSettings
from ratchet.types import EngineState
from stack.ports import free_port
from store import engines
from store.database import Database
from store.schema import PolicyVersionTable
from tests.integration.adapter.conftest import (
    adapter_here,
    adapter_settings,
    engine_process,
    open_rollout,
)
from tests.standins.tiny_model import make_tokenizer

WRAPPER = """
import asyncio, sys
from engine import process
from engine.wrapper import run_engine
settings = process.EngineSettings.model_validate_json(sys.argv[1])
slots = str(0 if settings.lora_rank is None else len(settings.slots))
command = [sys.executable, "-m", "tests.standins.engine", str(settings.port), settings.host, slots]
process.vllm_command = lambda settings, model: command
asyncio.run(run_engine(settings))
"""
"""The product's wrapper; only vLLM's command line is replaced, by that of the scripted engine."""


@dataclass
class Fleet:
    """The engines of one store."""

    database: Database
    postgres_url: str
    home: Path

    def settings(self, port: int, **values: Any) -> EngineSettings:
        return EngineSettings(
            model_path=self.home,
            port=port,
            database_url=self.postgres_url,
            state_dir=self.home,
            policies_root=self.home / "policies",
            **values,
        )

    @contextlib.asynccontextmanager
    async def engine(self, **values: Any) -> AsyncIterator["subprocess.Popen[bytes]"]:
        """Run the wrapper of an engine until the end of the block."""
        settings = self.settings(**({"port": free_port()} | values))
        wrapper = subprocess.Popen([sys.executable, "-c", WRAPPER, settings.model_dump_json()])
        try:
            yield wrapper
        finally:
            wrapper.terminate()
            wrapper.wait()

    async def rows(self) -> list[engines.EngineRow]:
        async with self.database.begin() as connection:
            return await engines.list_all_engines(connection)

    async def rows_by_id(self) -> dict[int, engines.EngineRow]:
        return {row.id: row for row in await self.rows()}

    async def wait_ready(self, number: int) -> list[engines.EngineRow]:
        async with asyncio.timeout(300):
            while True:
                ready = [row for row in await self.rows() if row.state is EngineState.READY]
                if len(ready) == number:
                    return ready
                await asyncio.sleep(0.05)

    async def wait_heartbeats(self, number: int) -> None:
        """Wait for heartbeats of the only engine: after two of them it has looked for versions that came meanwhile."""
        silent = 0.0
        while number:
            [row] = await self.rows()
            number -= row.silent_seconds < silent
            silent = row.silent_seconds
            await asyncio.sleep(0.05)

    async def publish(self, step: int, address: str | None = None, run_id: str = "run-1") -> str:
        """Publish the weights of a step as the learner does: the files first, then the row.

        With an address only what was uploaded is left, as on a host that shares nothing with the learner's.
        """
        directory = self.home / "policies" / run_id / f"{step}.e1"
        directory.mkdir(parents=True)
        file = directory / "model.safetensors"
        file.write_bytes(b"weights %d" % step)
        values = {"version": f"{run_id}/{step}.e1", "run_id": run_id, "step": step, "epoch": 1, "uri": str(directory)}
        if address is not None:
            values["uri"] = uri = weight_storage.version_address(address, f"{run_id}/{step}.e1")
            weight_storage.upload_version(directory, uri, describe_files(directory))
        files = [{"name": file.name, "sha256": file_sha256(file), "bytes": file.stat().st_size}]
        if address is not None:
            shutil.rmtree(directory)
        async with self.database.begin() as connection:
            await connection.execute(insert(PolicyVersionTable).values(**values, files=files))
        return f"{run_id}/{step}.e1"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory)
    return directory


@pytest.fixture
def fleet(database: Database, postgres_url: str, tmp_path: Path) -> Fleet:
    return Fleet(database, postgres_url, tmp_path)


async def ask(address: str, token: str, text: str = "x") -> int:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=300) as http:
        return (
            await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        ).status_code


async def seen(address: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as http:
        return dict((await http.get(address + "/calls")).json())


async def wait_until_gone(address: str) -> None:
    """Wait for the end of an engine whose wrapper was killed: the kernel ends it a moment later."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            await seen(address)
            await asyncio.sleep(0.01)


async def test_one_engine_is_killed_and_one_joins_late(fleet: Fleet, postgres_url: str, model_dir: Path) -> None:
    opened = [await open_rollout(fleet.database, member) for member in range(6)]
    async with (
        asyncio.timeout(300),
        fleet.engine() as first,
        fleet.engine(),
        adapter_here(adapter_settings(postgres_url, model_dir)) as adapter,
    ):
        both = await fleet.wait_ready(2)
        for text in ("a", "b"):
            assert {await ask(adapter, one.token, text) for one in opened} == {200}
        served = [len((await seen(row.address))["calls"]) for row in both]
        assert sum(served) == 12 and all(number % 2 == 0 for number in served), "a session keeps its engine"

        killed = next(row for row in both if row.details["pid"] == first.pid)
        left = next(row for row in both if row.id != killed.id)
        first.kill()
        await wait_until_gone(killed.address)
        assert {await ask(adapter, one.token, "c") for one in opened} == {200}
        after = await seen(left.address)
        assert len(after["calls"]) == served[both.index(left)] + 6

        newest = await fleet.publish(1)
        async with fleet.engine() as late:
            while not (joined := [row for row in await fleet.rows() if row.details.get("pid") == late.pid]):
                await asyncio.sleep(0.05)
            while (await fleet.rows_by_id())[joined[0].id].state is not EngineState.READY:
                await asyncio.sleep(0.05)
            row = (await fleet.rows_by_id())[joined[0].id]
            async with EngineClient(row.address) as client:
                assert (row.version, await client.version()) == (newest, newest)
            assert {await ask(adapter, one.token, "d") for one in opened} == {200}


async def test_an_engine_that_already_runs_is_registered_and_left_running(fleet: Fleet) -> None:
    await open_rollout(fleet.database)
    newest = await fleet.publish(1)
    async with asyncio.timeout(300), engine_process() as (address, process):
        async with fleet.engine(port=int(address.rpartition(":")[2]), is_attached=True):
            [row] = await fleet.wait_ready(1)
            async with EngineClient(address) as client:
                assert (row.version, await client.version()) == (newest, newest)
        assert await fleet.rows() == [] and process.poll() is None
        async with EngineClient(address) as client:
            assert await client.health()


async def test_a_registered_engine_that_is_started_anew_is_noticed(fleet: Fleet) -> None:
    """It serves its first weights; under the old label that would be wrong."""
    await open_rollout(fleet.database)
    await fleet.publish(1)
    async with asyncio.timeout(300), engine_process() as (address, _):
        async with fleet.engine(port=int(address.rpartition(":")[2]), is_attached=True) as wrapper:
            await fleet.wait_ready(1)
            async with httpx.AsyncClient(timeout=60) as http:
                await http.post(address + "/restart")
            assert await asyncio.to_thread(wrapper.wait) != 0, "the supervisor starts it again, and it loads anew"
            assert await fleet.rows() == []
        async with fleet.engine(port=int(address.rpartition(":")[2]), is_attached=True):
            assert [row.version for row in await fleet.wait_ready(1)] == ["run-1/1.e1"]


async def test_weights_of_another_run_are_not_taken_for_the_models_own(fleet: Fleet) -> None:
    async with asyncio.timeout(300), engine_process() as (address, _):
        async with EngineClient(address) as client:
            await client.set_version("run-0/7.e1")
        async with fleet.engine(port=int(address.rpartition(":")[2]), is_attached=True) as wrapper:
            assert await asyncio.to_thread(wrapper.wait) != 0
        assert await fleet.rows() == []


async def test_an_engine_without_the_shared_path_starts_and_goes_on_generating_while_it_fetches(fleet: Fleet) -> None:
    await open_rollout(fleet.database)
    address = f"file://{fleet.home}/stored"
    first = await fleet.publish(1, address)
    async with asyncio.timeout(300), fleet.engine():
        [row] = await fleet.wait_ready(1)
        assert row.version == first and row.has_fetched(first)
        await fleet.wait_heartbeats(2)
        before = await seen(row.address)
        second = await fleet.publish(2, address)
        while not (row := (await fleet.rows())[0]).has_fetched(second):
            await asyncio.sleep(0.05)
        assert (row.state, row.version) == (EngineState.READY, first)
        assert (await seen(row.address))["pauses"] == before["pauses"], "the pause is for loading, by learn.sync"


async def test_an_engine_that_waits_for_the_storage_ends_on_a_signal(fleet: Fleet) -> None:
    await open_rollout(fleet.database)
    await fleet.publish(1, f"file://{fleet.home}/stored")
    shutil.rmtree(fleet.home / "stored")
    async with asyncio.timeout(300), fleet.engine() as wrapper:
        while not [row for row in await fleet.rows() if row.fetch_error]:
            await asyncio.sleep(0.05)
        [row] = await fleet.rows()
        assert row.state is EngineState.STARTING
        wrapper.terminate()
        assert await asyncio.to_thread(wrapper.wait) == 0
    assert await fleet.rows() == []
