"""An engine set that comes or goes restarts no part of another."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from stack.engine_parts import choose_ports
from stack.parts import WATCHER, Part, Stack
from stack.serving_plan import ServingPlan, StackPlan, changing_plan, next_plan, read_plan
from stack.startup import _open_sets, _serve, _settle_sets, keep_served
from stack.supervisor import Supervisor
from store.database import Database
from store.migration import migrate
from store.runs import NewRun, create_run
from tests.free_ports import free_ports
from tests.integration.store.test_migration import url

__all__ = ["url"]
ENGINES_AND_READERS = ("engine", "adapter", WATCHER)


class Sleepers(Stack):
    """A stack with the product's engines, adapter and watcher, which do nothing."""

    def parts(self) -> list[Part]:
        found = [part for part in super().parts() if part.name.startswith(ENGINES_AND_READERS)]
        return [replace(part, command=["sleep", "1000"], stop_wait_seconds=5) for part in found]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Sleepers]:
    free_ports(tmp_path)
    stack = Sleepers(tmp_path)
    yield stack
    Supervisor(stack).down()


def plan_of(name: str, **values: Any) -> ServingPlan:
    config = RunConfig.model_validate({"datasets": [{"path": "x"}], "model": "/m", "engine_set": name} | values)
    return ServingPlan(config=config, model_path=Path(config.model))


def serve(stack: Stack, plan: StackPlan) -> dict[str, int | None]:
    """Do what `bring_up` does with a plan, and return the process of each part."""
    supervisor = Supervisor(stack)
    _serve(stack, supervisor, read_plan(stack), plan, lambda _: None)
    supervisor.up()
    return {part.name: part.pid for part in supervisor.states()}


def test_a_set_comes_and_goes_beside_processes_that_run_on(stack: Sleepers) -> None:
    default, other = plan_of("default", engines=2), plan_of("b")
    alone = StackPlan(sets={"default": default})
    before = serve(stack, alone)
    assert set(before) == {"engine", "engine-2", "adapter", WATCHER}
    both = serve(stack, next_plan(alone, other, {"default": default}))
    assert set(both) == {*before, "engine-b"} and both["engine-b"] is not None
    kept = ("engine", "engine-2", "adapter")
    assert [both[name] for name in kept] == [before[name] for name in kept]
    assert both[WATCHER] != before[WATCHER], "it reads the plan when it starts"
    again = serve(stack, next_plan(read_plan(stack), other, {"default": default}))
    assert again == both, "what is served already is left alone"
    after = serve(stack, next_plan(read_plan(stack), default, {}))
    assert set(after) == set(before) and [after[name] for name in kept] == [before[name] for name in kept]


def test_other_engine_settings_restart_the_engines_of_their_set_only(stack: Sleepers) -> None:
    sets = {"default": plan_of("default"), "b": plan_of("b")}
    before = serve(stack, StackPlan(sets=sets))
    after = serve(stack, StackPlan(sets=sets | {"b": plan_of("b", engine={"max_num_seqs": 2})}))
    assert {name for name in before if before[name] != after[name]} == {"engine-b", WATCHER}


def test_a_set_that_was_dropped_before_its_run_had_a_row_is_served_again(stack: Sleepers, model: Path) -> None:
    default, other = plan_of("default"), plan_of("b", model=str(model)).model_copy(update={"asked_at": 1000.0})
    before = serve(stack, StackPlan(sets={"default": default, "b": other}))
    keep_served(stack, other.config, lambda _: None)
    assert read_plan(stack) == StackPlan(sets={"default": default, "b": plan_of("b", model=str(model))}), (
        "the run's row keeps it now"
    )
    assert serve(stack, read_plan(stack)) == before, "a time is no change"
    serve(stack, StackPlan(sets={"default": default}))
    keep_served(stack, other.config, lambda _: None)
    assert list(read_plan(stack).sets) == ["default", "b"]
    assert {part.name for part in Supervisor(stack).states()} == set(before)


def test_one_command_at_a_time_changes_the_plan(stack: Sleepers) -> None:
    other = plan_of("b").model_copy(update={"asked_at": 1000.0})
    serve(stack, StackPlan(sets={"b": other}))
    waits = threading.Event()
    second = threading.Thread(target=keep_served, args=(stack, other.config, lambda _: waits.set()))
    with changing_plan(stack, lambda _: None):
        second.start()
        assert waits.wait(60) and read_plan(stack).sets["b"] == other
    second.join()
    assert read_plan(stack).sets["b"] == plan_of("b")


def test_a_command_keeps_the_ports_that_another_one_has_recorded(stack: Sleepers) -> None:
    sets = {name: plan_of(name) for name in ("default", "b", "c")}
    serve(stack, StackPlan(sets={"default": sets["default"]}))
    other = Sleepers(stack.home)
    for one, names in ((stack, ("default", "b")), (other, ("default", "b", "c"))):
        plan = StackPlan(sets={name: sets[name] for name in names})
        choose_ports(one, plan, one.engine_names())
        serve(one, plan)
    recorded = json.loads((stack.home / "ports.json").read_text())
    Supervisor(stack).up()
    assert json.loads((stack.home / "ports.json").read_text()) == recorded
    assert len({recorded[name] for name in ("engine", "engine-b", "engine-c")}) == 3


def test_without_a_plan_no_engine_runs_on_as_it_was(stack: Sleepers) -> None:
    """It is not known which GPUs and models the engines have."""
    sets = {"default": plan_of("default"), "b": plan_of("b", engines=2)}
    before = serve(stack, StackPlan(sets=sets))
    stack.plan_path.unlink()
    after = serve(stack, StackPlan(sets=sets))
    assert set(after) == set(before) and all(after[name] != before[name] for name in before)


@pytest.mark.parametrize(("refused", "reason"), [
    ({"engine_set": "b", "engine": {"max_num_seqs": 2}}, "run of-b is still open and its model or engine settings"),
    ({"engine_set": "c", "engines": [{"port": 9000}]}, "port 9000 of local is given to 2 engines"),
])  # fmt: skip
def test_a_config_that_is_refused_leaves_open_runs_their_engines(
    stack: Sleepers, url: str, monkeypatch: pytest.MonkeyPatch, refused: dict[str, Any], reason: str
) -> None:
    """After `ratchet down` it is not known before Postgres answers which sets have an open run."""
    opened, ended = plan_of("b", engines=[{"port": 9000}]), plan_of("default")
    monkeypatch.setenv("RATCHET_DATABASE_URL", url)
    migrate(url)
    asyncio.run(create_open_run(url, NewRun.of_config("of-b", "test", opened.config, None)))
    serve(stack, StackPlan(waiting={"default": ended, "b": opened}))
    with pytest.raises(ConfigError, match=reason):
        _settle_sets(stack, plan_of("x", **refused).config, lambda _: None)
    assert read_plan(stack) == StackPlan(sets={"b": opened})
    assert {part.name for part in Supervisor(stack).states() if part.pid} == {"engine-b", "adapter", WATCHER}


async def create_open_run(url: str, new: NewRun) -> None:
    async with Database(url) as database, database.begin() as connection:
        await create_run(connection, new)


def test_what_is_open_is_not_known_before_there_are_tables(
    stack: Sleepers, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncio.run(_open_sets(stack)) is None, "Postgres does not run"
    monkeypatch.setenv("RATCHET_DATABASE_URL", url)
    assert asyncio.run(_open_sets(stack)) is None
    migrate(url)
    assert asyncio.run(_open_sets(stack)) == []
