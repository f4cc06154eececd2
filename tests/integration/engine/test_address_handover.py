"""A vLLM server passes from one engine set to another: what was meant for the set before ends.

The wrappers are the product's, attached to the scripted engine.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import func, update

from engine import weight_update
from engine.client import EngineClient
from engine.weight_update import load_from_files
from engine.wrapper import EngineWrapper
from ratchet.errors import EngineUnavailableError
from ratchet.types import EngineState
from store import engines, runs
from store.schema import EngineTable
from tests.integration.adapter.conftest import adapter_here, adapter_settings, engine_process
from tests.integration.engine.test_engine_sets import RUNS, open_runs_of_both, ready_of
from tests.integration.engine.test_several_engines import Fleet, ask, fleet, model_dir, seen

__all__ = ["fleet", "model_dir"]


class Attached(NamedTuple):
    """A wrapper at work. `ended`: fails once it has to start anew."""

    wrapper: EngineWrapper
    stop: asyncio.Event
    ended: "asyncio.Task[None]"


class Server:
    """One running vLLM server, of which any set's wrapper may be told."""

    def __init__(self, fleet: Fleet, client: EngineClient, opened: dict[str, list[Any]]) -> None:
        """`opened`: open rollouts of each set."""
        self.fleet = fleet
        self.client = client
        self.opened = opened
        self.attached: list[Attached] = []

    def wrapper(self, engine_set: str) -> EngineWrapper:
        port = int(self.client.address.rpartition(":")[2])
        settings = self.fleet.settings(port, engine_set=engine_set, is_attached=True)
        return EngineWrapper(settings, self.fleet.database, self.client, asyncio.Event())

    def attach(self, engine_set: str) -> Attached:
        wrapper = self.wrapper(engine_set)
        self.attached.append(Attached(wrapper, wrapper.stop, asyncio.create_task(wrapper.run())))
        return self.attached[-1]

    async def attached_row(self, engine_set: str) -> engines.EngineRow:
        """Return the row of the engine, which is attached now."""
        self.attach(engine_set)
        [row] = await ready_of(self.fleet, engine_set)
        return row

    async def register(self, engine_set: str) -> int:
        async with self.fleet.database.begin() as connection:
            return await engines.register_engine(connection, self.client.address, "", {}, engine_set)

    async def row(self, engine_id: int) -> engines.EngineRow:
        async with self.fleet.database.begin() as connection:
            row = await engines.get_engine(connection, engine_id)
        assert row is not None
        return row


@pytest.fixture
async def server(fleet: Fleet) -> AsyncIterator[Server]:
    """A server, and a published version of a run of each set: a/2 and b/9."""
    opened = await open_runs_of_both(fleet.database)
    async with engine_process() as (address, _), EngineClient(address) as client:
        for name, step in (("a", 2), ("b", 9)):
            await fleet.publish(step, run_id=RUNS[name])
        server = Server(fleet, client, opened)
        yield server
        for one in server.attached:
            one.stop.set()
        await asyncio.gather(*(one.ended for one in server.attached), return_exceptions=True)


async def test_an_engine_whose_row_is_gone_registers_anew(server: Server, fleet: Fleet) -> None:
    """Another set has taken the address and has left it again; without a row the engine gets no call and no version."""
    before = server.attach("a")
    await ready_of(fleet, "a")
    other = await server.register("b")
    async with fleet.database.begin() as connection:
        await engines.set_engine_gone(connection, other)
    with pytest.raises(EngineUnavailableError, match="no longer registered for engine set a"):
        async with asyncio.timeout(120):
            await before.ended
    server.attach("a")
    [row] = await ready_of(fleet, "a")
    assert row.version == "run-a/2.e1"


async def test_an_engine_whose_row_is_gone_loads_nothing(server: Server, fleet: Fleet) -> None:
    wrapper = server.wrapper("a")
    wrapper.engine_id = await server.register("a")
    await server.register("b")
    with pytest.raises(EngineUnavailableError, match="no longer registered"):
        await wrapper._load_newer_versions()
    with pytest.raises(EngineUnavailableError, match="no longer starting"):
        await wrapper._set_ready(EngineState.STARTING)
    calls = await seen(server.client.address)
    assert (calls["pauses"], calls["updates"]) == ([], [])
    row = await server.row(wrapper.engine_id)
    assert (row.state, row.version) == (EngineState.GONE, None)


@pytest.mark.parametrize("phase", ["pause", "transfer"])
async def test_an_update_that_stalls_while_its_engine_passes_to_another_set_ends(
    server: Server, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Its version is not written over that of the other set, whose wrapper waits until the lease has run out."""
    row, [stalls, goes_on] = await server.attached_row("a"), [asyncio.Event(), asyncio.Event()]
    await fleet.publish(3, run_id=RUNS["a"])
    async with fleet.database.begin() as connection:
        version = await runs.newest_version(connection, RUNS["a"], 3)
    assert version is not None
    load = load_from_files(version, fleet.settings(1).policies_root)

    async def stall() -> None:
        stalls.set()
        await goes_on.wait()

    async def transfer(client: EngineClient) -> None:
        if phase == "transfer":
            await stall()
        await load(client)

    begin = weight_update._begin_pause

    async def begin_and_stall(*arguments: Any) -> Any:
        begun = await begin(*arguments)
        if phase == "pause":
            await stall()
        return begun

    monkeypatch.setattr(weight_update, "_begin_pause", begin_and_stall)
    updating = asyncio.create_task(weight_update.update_engine(fleet.database, row, version, transfer, False))
    await stalls.wait()
    server.attached[0].stop.set()
    await server.attached[0].ended
    with pytest.raises(EngineUnavailableError, match="is still updated for engine set a, for at most"):
        await server.register("b")
    async with fleet.database.begin() as connection:
        await connection.execute(update(EngineTable).values(paused_until=func.now()))
    server.attach("b")
    [of_b] = await ready_of(fleet, "b")
    goes_on.set()
    with pytest.raises(EngineUnavailableError, match="the pause ran out during the update"):
        await updating
    assert (of_b.version, await server.client.version()) == ("run-b/9.e1", "run-b/9.e1")
    assert not await server.client.is_paused()


async def test_an_attached_server_that_has_others_weights_loads_its_own(server: Server, fleet: Fleet) -> None:
    """A version that another set has written to it under another name of the same host, for example."""
    await server.attached_row("a")
    await server.client.set_version("run-b/9.e1")
    with pytest.raises(EngineUnavailableError, match=r"run-b/9\.e1, but its row says run-a/2\.e1"):
        async with asyncio.timeout(120):
            await server.attached[0].ended
    await server.attached_row("a")
    assert await server.client.version() == "run-a/2.e1"


async def test_a_sync_between_the_two_reads_is_no_contradiction(server: Server, fleet: Fleet) -> None:
    wrapper = server.wrapper("a")
    wrapper.engine_id = await server.register("a")
    await wrapper._load_newer_versions()
    await wrapper._set_ready(EngineState.STARTING)
    row = await server.row(wrapper.engine_id)
    await wrapper._require_own_weights("run-a/1.e1", row)


async def test_the_calls_of_the_set_before_end_when_the_address_passes_to_another(
    server: Server, fleet: Fleet, postgres_url: str, model_dir: Path
) -> None:
    """A call that the server works on is asked again of the set's next engine, whose answer is used."""
    mine = server.opened["a"][0]
    before = await server.attached_row("a")
    async with httpx.AsyncClient(base_url=before.address, timeout=60) as http:
        await http.post("/script", json={"outputs": [{"ids": [1], "hold": "gate"}]})
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as adapter, asyncio.timeout(120):
        asking = asyncio.create_task(ask(adapter, mine.token))
        while not (await seen(before.address))["calls"]:
            await asyncio.sleep(0.05)
        await server.register("b")
        async with fleet.engine(engine_set="a"):
            [after] = await ready_of(fleet, "a")
            assert await asking == 200
    [turn] = await mine.turns()
    assert turn.engine_id == after.id != before.id
