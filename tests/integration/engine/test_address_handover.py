"""A vLLM server passes from one engine set to another: what was meant for the set before ends.

The wrappers are the product's, attached to the scripted engine.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from engine.client import EngineClient
from engine.wrapper import EngineWrapper
from ratchet.errors import EngineUnavailableError
from ratchet.store import engines
from ratchet.types import EngineState
from tests.integration.adapter.conftest import engine_process
from tests.integration.engine.test_engine_sets import RUNS, open_runs_of_both, ready_of
from tests.integration.engine.test_several_engines import Fleet, fleet, seen

__all__ = ["fleet"]


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
