"""Two runs share an engine, each by its LoRA slot: every token has the version that its own run's slot had.

The adapter, the update and the wrapper are the product's. In the place of vLLM is the scripted engine, which samples
the step of the files that it was given for the slot of the call, so that a token tells which adapter sampled it.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from engine import weight_update
from engine.client import EngineClient
from engine.weight_update import load_from_files, update_engine
from engine.wrapper import EngineWrapper
from ratchet.errors import EngineUnavailableError
from ratchet.types import EngineState, RunState, TurnState, policy_step
from stack.ports import free_port
from store import engines, runs
from store.arrays import ids_from_bytes
from store.engines import EngineRow
from store.schema import EngineLoadTable, EngineTable, RunTable, TurnTable
from tests.integration.adapter.conftest import adapter_here, adapter_settings, engine_process, open_rollout
from tests.integration.engine.test_several_engines import Fleet, ask, fleet, model_dir, seen

__all__ = ["fleet", "model_dir"]
SET = "shared"
SLOTS = {"run-a": 1, "run-b": 2}


async def open_both(fleet: Fleet, number_of_each: int) -> dict[str, list[Any]]:
    """Return open rollouts of two runs that share a set."""
    opened: dict[str, list[Any]] = {}
    for run_id, slot in SLOTS.items():
        numbers = range(number_of_each * len(opened), number_of_each * (len(opened) + 1))
        opened[run_id] = [await open_rollout(fleet.database, number, run_id, SET) for number in numbers]
        async with fleet.database.begin() as connection:
            await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(lora_slot=slot))
    return opened


async def row_of(fleet: Fleet, state: EngineState | None = None) -> EngineRow:
    async with asyncio.timeout(300):
        while True:
            async with fleet.database.begin() as connection:
                rows = await engines.list_engines(connection, SET)
            if len(rows) == 1 and state in (None, rows[0].state):
                return rows[0]
            await asyncio.sleep(0.05)


@dataclass
class Call:
    """A call in flight: the names of the holds that it has not been released from."""

    session_id: int
    run_id: str
    answer: "asyncio.Task[int]"
    holds: list[str]


@dataclass
class Shared:
    """The engine that both runs share, with its wrapper, and the calls that are in flight."""

    fleet: Fleet
    adapter: str
    wrapper: EngineWrapper
    sessions: dict[str, list[Any]]
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SLOTS, 0))
    usable: dict[str, list[int]] = field(default_factory=lambda: {run_id: [] for run_id in SLOTS})
    calls: list[Call] = field(default_factory=list)
    num_begun: int = 0

    async def post(self, path: str, body: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            (await http.post(self.wrapper.settings.address + path, json=body)).raise_for_status()

    async def begin_call(self, run_id: str, num_tokens: int) -> None:
        opened = self.sessions[run_id].pop()
        holds = [f"{opened.session_id}/{number}" for number in range(num_tokens)]
        await self.post("/script", {"outputs": [{"tell": holds}]})
        answer = asyncio.create_task(ask(self.adapter, opened.token))
        self.num_begun += 1
        while len((await seen(self.wrapper.settings.address))["calls"]) < self.num_begun:
            assert not answer.done(), answer.result()
            async with self.fleet.database.begin() as connection:  # on a busy machine it has been silent for too long
                await engines.heartbeat_engine(connection, self.wrapper.engine_id)
            await asyncio.sleep(0.01)
        self.calls.append(Call(opened.session_id, run_id, answer, list(holds)))

    async def sample(self, call: Call) -> None:
        """Let the engine sample the call's next token."""
        await self.post("/release", {"hold": call.holds.pop(0)})

    async def publish(self, run_id: str) -> Any:
        self.steps[run_id] += 1
        self.usable[run_id].append(self.steps[run_id])
        await self.fleet.publish(self.steps[run_id], run_id=run_id)
        async with self.fleet.database.begin() as connection:
            return await runs.newest_version(connection, run_id)

    async def sync(self, run_id: str) -> None:
        version, slot = await self.publish(run_id), SLOTS[run_id]
        transfer = load_from_files(version, self.wrapper.settings.policies_root, slot)
        row = await row_of(self.fleet)
        await update_engine(self.fleet.database, row, version, transfer, False, slot)

    async def die_in_sync(self, run_id: str, is_damaged: bool) -> None:
        """A sync that dies with the adapter in its slot and the label of before; the wrapper takes over.

        `is_damaged`: the version's files change on the disk then, so that the slot gets the version of before again.
        """
        version, slot = await self.publish(run_id), SLOTS[run_id]
        async with self.fleet.database.begin() as connection:
            assert await engines.begin_engine_pause(connection, self.wrapper.engine_id, 60)
        await self.wrapper.client.pause()
        await self.wrapper.client.start_update()
        await load_from_files(version, self.wrapper.settings.policies_root, slot)(self.wrapper.client)
        if is_damaged:
            self.usable[run_id].pop()
            (Path(version.uri) / "model.safetensors").write_bytes(b"damaged")
        async with self.fleet.database.begin() as connection:
            await connection.execute(update(EngineTable).values(paused_until=func.now()))
        await self.wrapper._heartbeat()

    async def catch_up(self, run_id: str) -> None:
        """A version that every sync has missed, since the engine was silent."""
        await self.publish(run_id)
        self.wrapper.heartbeat_at = float("-inf")
        await self.wrapper._heartbeat()

    async def end_calls(self) -> None:
        for call in self.calls:
            while call.holds:
                await self.sample(call)
            assert await call.answer == 200


@pytest.fixture
async def shared(fleet: Fleet, postgres_url: str, model_dir: Path) -> AsyncIterator[Shared]:
    opened = await open_both(fleet, 12)
    async with (
        asyncio.timeout(600),
        engine_process(num_slots=2) as (address, _),
        EngineClient(address) as client,
        adapter_here(adapter_settings(postgres_url, model_dir)) as adapter,
    ):
        port = int(address.rpartition(":")[2])
        settings = fleet.settings(port, engine_set=SET, lora_rank=8, lora_runs=2)
        wrapper = EngineWrapper(settings, fleet.database, client, asyncio.Event())
        async with fleet.database.begin() as connection:
            wrapper.engine_id = await engines.register_engine(connection, address, "", {}, SET)
            await connection.execute(update(EngineTable).values(state=EngineState.READY))
        wrapper.is_up = True
        yield Shared(fleet, adapter, wrapper, opened)


@pytest.mark.parametrize("seed", range(6))
async def test_every_token_has_the_version_that_its_runs_slot_had(shared: Shared, seed: int) -> None:
    """Calls of both runs, updates of both, updates that die and missed versions, in a random order."""
    chance = random.Random(seed)
    for run_id in SLOTS:
        await shared.sync(run_id)
    for _ in range(48):
        run_id = chance.choice(list(SLOTS))
        held = [call for call in shared.calls if call.holds]
        match chance.choice(["begin", "sample", "sample", "sample", "sync", "die", "die damaged", "catch up"]):
            case "begin" if shared.sessions[run_id]:
                await shared.begin_call(run_id, chance.randint(1, 6))
            case "sample" if held:
                await shared.sample(chance.choice(held))
            case "sync":
                await shared.sync(run_id)
            case "die":
                await shared.die_in_sync(run_id, is_damaged=False)
            case "die damaged":
                await shared.die_in_sync(run_id, is_damaged=True)
            case "catch up":
                await shared.catch_up(run_id)
    await shared.end_calls()
    row = await row_of(shared.fleet)
    assert row.version == ";".join(f"{run_id}/{steps[-1]}.e1" for run_id, steps in shared.usable.items())
    async with shared.fleet.database.begin() as connection:
        turns = {
            row.session_id: row
            for row in await connection.execute(select(TurnTable).where(TurnTable.state == TurnState.COMPLETED))
        }
        loads = set((await connection.execute(select(EngineLoadTable.version))).scalars())
    assert set(turns) == {call.session_id for call in shared.calls}
    for call in shared.calls:
        turn = turns[call.session_id]
        told = ids_from_bytes(turn.sampled_ids).tolist()
        for span in turn.version_spans:
            assert span["version"].startswith(f"{call.run_id}/")
            assert set(told[span["start"] : span["end"]]) == {policy_step(span["version"])}
        versions = [span["version"] for span in turn.version_spans]
        assert len(set(versions)) == len(versions), "an update of the other run cuts no span"
    assert loads == {f"{run_id}/{step}.e1" for run_id, steps in shared.usable.items() for step in steps}


async def test_a_sync_that_stalls_past_its_lease_labels_nothing(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped before the update; meanwhile the wrapper takes over and the other run is updated."""
    await shared.sync("run-a")
    await shared.sync("run-b")
    stalled, wake = asyncio.Event(), asyncio.Event()

    async def no_renewal(*_: Any) -> None:
        await asyncio.Event().wait()

    started = EngineClient.start_update

    async def start(client: EngineClient) -> None:
        if asyncio.current_task() is sync:
            stalled.set()
            await wake.wait()
        await started(client)

    monkeypatch.setattr(weight_update, "_renew_lease", no_renewal)
    monkeypatch.setattr(EngineClient, "start_update", start)
    version = await shared.publish("run-a")
    transfer = load_from_files(version, shared.wrapper.settings.policies_root, SLOTS["run-a"])
    engine = await row_of(shared.fleet)
    sync = asyncio.create_task(update_engine(shared.fleet.database, engine, version, transfer, False, SLOTS["run-a"]))
    await stalled.wait()
    async with shared.fleet.database.begin() as connection:
        await connection.execute(update(EngineTable).values(paused_until=func.now()))
    await shared.wrapper._heartbeat()
    await shared.sync("run-b")
    label = await shared.wrapper.client.version()
    wake.set()
    with pytest.raises(EngineUnavailableError, match="it was updated since this update began"):
        await sync
    assert await shared.wrapper.client.version() == label == (await row_of(shared.fleet, EngineState.READY)).version
    await shared.begin_call("run-b", 2)
    await shared.end_calls()


async def test_an_update_for_a_slot_that_another_run_has_now_changes_nothing(shared: Shared) -> None:
    await shared.sync("run-a")
    await shared.sync("run-b")
    before = await row_of(shared.fleet)
    async with shared.fleet.database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == "run-a").values(lora_slot=2))
    with pytest.raises(EngineUnavailableError, match=r"slot 2 .* is no longer that of run-b"):
        await shared.sync("run-b")
    assert await row_of(shared.fleet) is not None and (await row_of(shared.fleet)).version == before.version
    assert len((await seen(shared.wrapper.settings.address))["updates"]) == 2


@pytest.mark.parametrize("way", ["sync", "catch up"])
async def test_the_version_of_an_ended_run_leaves_the_label_with_the_next_update(shared: Shared, way: str) -> None:
    """The update may bring another base, without the adapter of the run that has ended."""
    await shared.sync("run-a")
    await shared.sync("run-b")

    async def set_state(state: RunState) -> None:
        async with shared.fleet.database.begin() as connection:
            await connection.execute(update(RunTable).where(RunTable.run_id == "run-b").values(state=state))

    await set_state(RunState.STOPPED)
    await (shared.sync("run-a") if way == "sync" else shared.catch_up("run-a"))
    assert (await row_of(shared.fleet)).version == "run-a/2.e1"
    await set_state(RunState.RUNNING)
    await (shared.sync("run-b") if way == "sync" else shared.catch_up("run-b"))
    assert (await row_of(shared.fleet)).version == "run-a/2.e1;run-b/2.e1"


async def test_a_killed_engine_comes_back_with_the_versions_of_both(
    fleet: Fleet, postgres_url: str, model_dir: Path
) -> None:
    opened = await open_both(fleet, 2)
    newest = [await fleet.publish(step, run_id=run_id) for run_id, step in zip(SLOTS, (7, 2), strict=True)]
    values = {"engine_set": SET, "lora_rank": 8, "lora_runs": 2, "port": free_port()}
    async with asyncio.timeout(300), adapter_here(adapter_settings(postgres_url, model_dir)) as adapter:
        for number in range(2):
            async with fleet.engine(**values) as wrapper:
                row = await row_of(fleet, EngineState.READY)
                assert row.version == ";".join(newest)
                for run_id, slot in SLOTS.items():
                    assert await ask(adapter, opened[run_id][number].token) == 200
                    [*_, call] = (await seen(row.address))["calls"]
                    assert call["model"] == ("policy" if slot == 1 else f"policy-{slot}")
                wrapper.kill()
                await asyncio.to_thread(wrapper.wait)
            async with fleet.database.begin() as connection:
                await connection.execute(update(EngineTable).values(state=EngineState.GONE))
