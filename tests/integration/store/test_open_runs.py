"""One run of an engine set is open at a time, also if two begin in the same moment, unless they share its engines; runs
of different sets are.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import JsonObject, RunState
from store import open_runs, runs
from store.database import Database
from store.runs import NewRun


def new_run(run_id: str, engine_set: str, **values: Any) -> NewRun:
    config = RunConfig.model_validate({"datasets": [{"path": "x"}], "engine_set": engine_set, **values})
    return NewRun.of_config(run_id, "test", config, None)


async def begin(database: Database, run_id: str, engine_set: str, checked: asyncio.Event, go: asyncio.Event) -> None:
    """Create a run as `create_run_from_config` does: the check and the row in one transaction."""
    async with database.begin() as connection:
        new = new_run(run_id, engine_set)
        await open_runs.require_slot(connection, run_id, RunConfig.model_validate(new.config))
        checked.set()
        await go.wait()
        await runs.create_run(connection, new)


async def end(database: Database, run_id: str, state: RunState = RunState.STOPPED) -> None:
    async with database.begin() as connection:
        await runs.end_run(connection, run_id, state)


async def test_of_two_runs_of_a_set_that_begin_at_once_one_is_refused_by_name(database: Database) -> None:
    async with asyncio.timeout(60):
        checked, go = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(begin(database, "first", "b", checked, go))
        await checked.wait()
        second = asyncio.create_task(begin(database, "second", "b", asyncio.Event(), go))
        go.set()
        await first
        with pytest.raises(ConfigError, match=r"run first of engine set 'b' is still open.*`ratchet stop first`"):
            await second


async def test_two_runs_of_two_sets_begin_at_once(database: Database) -> None:
    async with asyncio.timeout(60):
        go, checked = asyncio.Event(), [asyncio.Event(), asyncio.Event()]
        begun = [
            asyncio.create_task(begin(database, name, name, one, go))
            for name, one in zip(("default", "b"), checked, strict=True)
        ]
        for one in checked:  # both have passed the check before either has a row
            await one.wait()
        go.set()
        await asyncio.gather(*begun)
    async with database.begin() as connection:
        assert {(one.engine_set, one.run_id) for one in await open_runs.open_sets(connection)} == {
            ("default", "default"),
            ("b", "b"),
        }


async def test_a_stopped_run_is_not_resumed_while_another_has_its_set(database: Database) -> None:
    async with database.begin() as connection:
        await runs.create_run(connection, new_run("first", "b"))
    await end(database, "first")
    async with database.begin() as connection:
        second = new_run("second", "b")
        await open_runs.require_slot(connection, "second", RunConfig.model_validate(second.config))
        await runs.create_run(connection, second)
        await runs.create_run(connection, new_run("other", "c"))
    with pytest.raises(ConfigError, match="run second of engine set 'b' is still open"):
        async with database.begin() as connection:
            await open_runs.resume_run(connection, "first")
    await end(database, "second")
    async with database.begin() as connection:
        await open_runs.resume_run(connection, "first")
        assert set(await open_runs.unfinished_runs(connection)) == {"first", "other"}


async def test_of_several_open_runs_one_must_be_named(database: Database) -> None:
    async with database.begin() as connection:
        assert await open_runs.newest_run(connection) is None
        await runs.create_run(connection, new_run("first", "default"))
        assert await open_runs.newest_run(connection) == "first"
        await runs.create_run(connection, new_run("second", "b"))
    with pytest.raises(ConfigError, match=r"2 runs are open: first \(engine set default\), second \(engine set b\)"):
        async with database.begin() as connection:
            await open_runs.newest_run(connection)
    await end(database, "second")
    async with database.begin() as connection:
        assert await open_runs.newest_run(connection) == "first"


async def test_a_set_without_engines_pauses_its_own_run_only(database: Database) -> None:
    async with database.begin() as connection:
        for name in ("default", "b"):
            await runs.create_run(connection, new_run(f"of-{name}", name))
        await open_runs.pause_all_runs(connection, "engine-b is given up", only_with_rollouts=True, engine_set="b")
        found = {one.run_id: one.state for one in await open_runs.open_sets(connection)}
    assert found == {"of-default": "running", "of-b": "paused"}


LORA = {"rank": 4}
FILES = [{"name": "model.safetensors", "sha256": "aa"}]


async def join(database: Database, run_id: str, files: list[JsonObject] | None = None, **values: Any) -> int:
    """Create a run that may share the engines of set `b`, with its version 0, and return its slot."""
    files = FILES if files is None else files
    values = {"engine": {"lora_runs": 2}, "training": {"lora": LORA}} | values
    new = new_run(run_id, "b", **values)
    async with database.begin() as connection:
        slot = await open_runs.require_slot(connection, run_id, RunConfig.model_validate(new.config), files)
        await runs.create_run(connection, replace(new, lora_slot=slot))
        await runs.publish_initial(connection, f"{run_id}/0.e0", run_id, "/nowhere", files)
    return slot


async def test_runs_with_lora_share_a_set_each_in_a_slot_of_its_own(database: Database) -> None:
    assert [await join(database, name) for name in ("first", "second")] == [1, 2]
    with pytest.raises(
        ConfigError, match=r"run first .*all LoRA slots .*\(engine.lora_runs: 2\).*`ratchet stop first`"
    ):
        await join(database, "third")
    await end(database, "first")
    assert await join(database, "third") == 1
    async with database.begin() as connection:
        held = {name: await open_runs.has_slot(connection, name, 1) for name in ("first", "second", "third")}
        assert held == {"first": False, "second": False, "third": True}
    with pytest.raises(ConfigError, match="all LoRA slots"):
        async with database.begin() as connection:
            await open_runs.resume_run(connection, "first")
    await end(database, "second")
    async with database.begin() as connection:
        assert not await open_runs.has_slot(connection, "second", 2), "a late sync of an ended run finds no slot"
        await open_runs.resume_run(connection, "first")
        found = {name: await runs.get_run(connection, name) for name in ("first", "third")}
    assert {name: row and row.lora_slot for name, row in found.items()} == {"first": 2, "third": 1}
    await end(database, "third")
    await end(database, "first")
    async with database.begin() as connection:
        await open_runs.resume_run(connection, "first")
        row = await runs.get_run(connection, "first")
    assert row is not None and row.lora_slot == 2, "its former slot is free"


@pytest.mark.parametrize(("values", "files", "reason"), [
    ({"training": {}, "engine": {}}, None, "one policy at a time, unless all its runs have `training.lora`"),
    ({"training": {"lora": {"rank": 9}}}, None, r"training.lora.rank is 8 there and 16 here"),
    ({"engine": {"lora_runs": 2, "max_num_seqs": 3}}, None, "engine.max_num_seqs is 64 there and 3 here"),
    ({"engine": {"lora_runs": 3}}, None, "engine.lora_runs is 2 there and 3 here"),
    ({}, [{"name": "model.safetensors", "sha256": "bb"}], "its version 0 has other weights"),
])  # fmt: skip
async def test_a_run_that_the_engines_cannot_serve_beside_another_is_refused(
    database: Database, values: dict[str, Any], files: list[JsonObject] | None, reason: str
) -> None:
    await join(database, "first")
    with pytest.raises(ConfigError, match=f"run first of engine set 'b' is still open, and .*{reason}"):
        await join(database, "second", files, **values)


async def test_a_run_of_all_weights_shares_its_set_with_no_adapter(database: Database) -> None:
    async with database.begin() as connection:
        await runs.create_run(connection, new_run("first", "b"))
    with pytest.raises(ConfigError, match=r"run first .*has no `training.lora`"):
        await join(database, "second")
