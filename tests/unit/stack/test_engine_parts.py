"""Each engine of the config is a part of the stack, with a port and an address of its own."""

import socket
from pathlib import Path
from typing import Any

import pytest

from engine.process import vllm_command
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, MachineError
from ratchet.model_directory import model_of
from stack import gpus
from stack.engine_parts import (
    choose_ports,
    engine_addresses,
    engine_settings,
    learner_devices,
    place_parts,
    place_plan,
    replaced_parts,
    with_gpus,
)
from stack.part_health import HealthState, PartHealth
from stack.parts import Stack
from stack.placement import set_of_part
from stack.probes import LIMITS, is_missed, limits_of
from stack.serving_plan import ServingPlan, StackPlan, next_plan, wants_other, write_plan


def plan_of(stack: Stack, **values: Any) -> ServingPlan:
    config = RunConfig.model_validate({"datasets": [{"path": "x"}], **values})
    return ServingPlan(config=config, model_path=model_of(config))


def of_sets(*plans: ServingPlan) -> StackPlan:
    return StackPlan(sets={plan.config.engine_set: plan for plan in plans})


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    for name in ("RAY_ADDRESS", "RATCHET_DATABASE_URL", "RATCHET_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Stack(tmp_path)


def test_a_stack_without_a_plan_has_one_engine(stack: Stack) -> None:
    assert stack.engine_names() == ["engine"] == list(engine_addresses(stack))


def test_every_engine_has_a_part_a_port_and_an_address(stack: Stack) -> None:
    write_plan(stack, plan_of(stack, engines=[{"count": 2}, {"address": "http://10.0.0.9:8000"}, {"port": 19000}]))
    stack.refresh_ports()
    parts = [part for part in stack.parts() if part.name.startswith("engine")]
    assert [part.name for part in parts] == ["engine", "engine-2", "engine-3", "engine-4"]
    assert [part.command[-1] for part in parts] == ["engine", "2", "3", "4"]
    stack.keep_ports()
    found = engine_addresses(stack)
    assert found["engine-3"] == "http://10.0.0.9:8000" and found["engine-4"] == "http://127.0.0.1:19000"
    assert len(set(found.values())) == 4
    assert engine_addresses(Stack(stack.home)) == found, "a restarted part finds its port"


def test_more_engines_do_not_interrupt_a_run(stack: Stack) -> None:
    one, two = plan_of(stack), plan_of(stack, engines=2)
    assert not wants_other(of_sets(one), two.config) and replaced_parts(of_sets(one), of_sets(two)) == []
    assert replaced_parts(of_sets(two), of_sets(one)) == ["engine-2"]


def test_a_set_comes_and_goes_while_the_engines_of_the_others_run_on(stack: Stack) -> None:
    one, other = plan_of(stack, engines=2), plan_of(stack, engine_set="b", engines=2)
    alone, both = of_sets(one), of_sets(one, other)
    assert replaced_parts(alone, both) == []
    assert replaced_parts(both, alone) == ["engine-b", "engine-b-2"]
    write_plan(stack, alone)
    stack.keep_ports()
    commands = {part.name: part.command for part in stack.parts()}
    addresses = engine_addresses(stack)
    write_plan(stack, both)
    stack.refresh_ports()
    assert {part.name: part.command for part in stack.parts()} == commands | {
        "engine-b": [*commands["engine"], "--set", "b"],
        "engine-b-2": [*commands["engine"], "--set", "b", "--number", "2"],
    }
    found = engine_addresses(stack)
    assert found == addresses | {name: found[name] for name in ("engine-b", "engine-b-2")}
    assert len(set(found.values())) == 4
    changed = plan_of(stack, engine_set="b", engines=2, engine={"max_num_seqs": 2})
    assert replaced_parts(both, of_sets(one, changed)) == ["engine-b", "engine-b-2"]
    assert [set_of_part(name) for name in (*found, "learner")] == ["default", "default", "b", "b", None]


def test_every_engine_is_replaced_if_the_machine_has_other_gpus(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    before = of_sets(plan_of(stack, engines=2), plan_of(stack, engine_set="b", engines=2))
    assert replaced_parts(before, of_sets(plan_of(stack))) == ["engine", "engine-2", "engine-b", "engine-b-2", "ray"]


def test_the_engine_of_a_set_is_told_its_set(stack: Stack) -> None:
    both = of_sets(plan_of(stack), plan_of(stack, engine_set="b"))
    engines = {name: placement.engines[0] for name, placement in place_plan(both).items()}
    write_plan(stack, both)
    stack.refresh_ports()
    settings = {name: engine_settings(stack, both.sets[name], engine) for name, engine in engines.items()}
    assert {name: one.engine_set for name, one in settings.items()} == {"default": "default", "b": "b"}
    assert settings["b"].pidfile != settings["default"].pidfile


@pytest.mark.parametrize(("one", "other"), [
    ("http://127.0.0.1:9000", "http://localhost:9000"), ("http://10.0.0.9:8000", "http://10.0.0.9:08000"),
    ("http://h:8000", "HTTP://H:8000/"), ("http://h", "http://h:80"), ("http://OWN:9000", "http://[::1]:9000"),
])  # fmt: skip
def test_one_server_is_in_one_set_under_all_its_names(stack: Stack, one: str, other: str) -> None:
    addresses = [name.replace("OWN", socket.gethostname()) for name in (one, other)]
    first, second = ([{"address": address}] for address in addresses)
    both = of_sets(plan_of(stack, engines=first), plan_of(stack, engine_set="b", engines=second))
    with pytest.raises(ConfigError, match=r"is given to 2 engines \(engine, engine-b\)"):
        choose_ports(stack, both, [])


def test_a_chosen_port_is_none_that_another_set_names(stack: Stack) -> None:
    alone = of_sets(plan_of(stack))
    choose_ports(stack, alone, [])
    port = stack.ports["engine"]
    stack.record_ports()
    write_plan(stack, alone)
    for entry in ({"port": port}, {"address": f"http://127.0.0.1:{port}"}):
        both = of_sets(plan_of(stack), plan_of(stack, engine_set="b", engines=[entry]))
        with pytest.raises(ConfigError, match=f"port {port} of local is given to 2 engines"):
            choose_ports(stack, both, ["engine"])
        choose_ports(stack, both, [])
        assert stack.ports["engine"] != port, "it does not run yet"
        stack.refresh_ports(alone.model_dump(mode="json"))
        assert stack.ports["engine"] == port


def test_sets_keep_the_gpus_that_they_were_given(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    first = plan_of(stack, training={"workers": 1, "gpus": {"local": [1]}})
    second = plan_of(stack, engine_set="b", training={"workers": 1})
    both = with_gpus(of_sets(first, second))
    gpus = {name: placement.engines[0].gpus for name, placement in place_plan(both).items()}
    assert gpus == {"default": (0,), "b": (2,)} and both.sets["b"].gpus == {"engine-b": (2,), "learner": (3,)}
    devices = learner_devices(both)
    assert devices is not None and (devices.environment, devices.num_gpus) == ({"CUDA_VISIBLE_DEVICES": "1,3"}, 2)
    left = of_sets(both.sets["b"])
    assert place_plan(left)["b"].engines[0].gpus == (2,), "an engine that runs on is where it was"
    assert replaced_parts(both, left) == ["engine", "ray"]


def test_a_set_that_grows_moves_no_part_of_another(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    first, grown, naming = (
        plan_of(stack, engines=engines, training={"workers": 1, "gpus": {"local": [7]}})
        for engines in (1, 2, [{"gpus": [1]}])
    )
    for training in ({"workers": 1, "gpus": {"local": [6]}}, {"workers": 1, "gpus": {"local": [5, 6]}}):
        second = plan_of(stack, engine_set="b", training=training)
        both = with_gpus(next_plan(with_gpus(of_sets(first)), second, {"default": first}))
        after = with_gpus(next_plan(both, grown, {"default": first, "b": second}))
        assert [engine.gpus for engine in place_plan(after)["default"].engines] == [(0,), (2,)]
        assert [engine.gpus for engine in place_plan(after)["b"].engines] == [(1,)]
        assert replaced_parts(both, after) == [] and with_gpus(after) == after
        with pytest.raises(ConfigError, match=r"GPU 1 of local is given to engine .* and to engine-b \(engine set b\)"):
            with_gpus(next_plan(both, naming, {"default": first, "b": second}))


def test_a_learner_gives_gpus_that_no_config_names_to_new_engines_of_its_set(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    before = with_gpus(of_sets(plan_of(stack, training={"workers": 1})))
    assert before.sets["default"].gpus == {"engine": (0,), "learner": (1, 2, 3)}
    after = with_gpus(next_plan(before, plan_of(stack, engines=2, training={"workers": 1}), {}))
    assert len(after.sets["default"].gpus["learner"]) == 2 and replaced_parts(before, after) == ["ray"]
    assert with_gpus(after) == after
    moved = plan_of(stack, engines=[{"host": "10.0.0.2"}], training={"workers": 1})
    assert next_plan(before, moved, {}).sets["default"].gpus == {"learner": (1, 2, 3)}, "it has left its host"


@pytest.mark.parametrize("gpus", [None, {"local": [3]}])
def test_a_set_that_was_evaluated_gets_gpus_for_its_learner(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    first = plan_of(stack, training={"workers": 1, "gpus": {"local": [1]}})
    evaluated, trained = (
        plan_of(stack, engine_set="b", training={"workers": 1, "gpus": gpus, "steps": steps}) for steps in (0, 5)
    )
    before = with_gpus(next_plan(of_sets(first), evaluated, {"default": first}))
    assert place_plan(before)["b"].learner == {}
    after = with_gpus(next_plan(before, trained, {"default": first}))
    assert place_plan(after)["b"].learner == {"local": (3,)} and replaced_parts(before, after) == ["ray"]
    assert next_plan(after, evaluated, {"default": first, "b": trained}) == after, "its learner keeps them"


def test_router_replay_restarts_engines_that_return_no_experts(stack: Stack) -> None:
    without, asking = plan_of(stack), plan_of(stack, training={"router_replay": True})
    before = of_sets(without)
    assert wants_other(before, asking.config) and not wants_other(before, without.config)
    (engine,) = place_parts(asking.config).engines
    argument = "--enable-return-routed-experts"
    for plan, count in ((without, 0), (asking, 1)):
        settings = engine_settings(stack, plan, engine)
        assert vllm_command(settings, plan.model_path).count(argument) == count


def test_gpus_are_those_of_the_job_and_each_part_sees_its_own(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    plan = plan_of(stack, engines=2, training={"workers": 1})
    write_plan(stack, plan)
    stack.refresh_ports()
    engines = place_parts(plan.config).engines
    shown = [engine_settings(stack, plan, engine).environment for engine in engines]
    assert shown == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    devices = learner_devices(of_sets(plan))
    assert devices is not None and (devices.environment, devices.num_gpus) == ({"CUDA_VISIBLE_DEVICES": "7"}, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus.usable_gpus() == [] and learner_devices(of_sets(plan)) is None


def test_an_engine_of_another_host_needs_services_that_it_reaches(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(stack, engines=[{"host": "10.0.0.2", "gpus": [1]}])
    [engine] = place_parts(plan.config).engines
    with pytest.raises(MachineError, match="RAY_ADDRESS"):
        engine_settings(stack, plan, engine)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RATCHET_DATABASE_URL", "postgresql://db.example.org/ratchet")
    settings = engine_settings(stack, plan, engine)
    assert (settings.address, settings.environment) == (
        "http://10.0.0.2:18100",
        {"CUDA_VISIBLE_DEVICES": "1", "PYTORCH_ALLOC_CONF": ""},
    ), "not the limit of the ranks on its node"


def test_runs_miss_an_engine_only_if_no_other_is_left() -> None:
    health = {name: PartHealth(name, HealthState.GIVEN_UP) for name in ("engine", "engine-2", "worker", "viewer")}
    assert is_missed("engine-2", health) and is_missed("worker", health) and not is_missed("viewer", health)
    health["engine"] = PartHealth("engine", HealthState.FAILING)
    assert not is_missed("engine-2", health)
    health["engine-b"] = PartHealth("engine-b", HealthState.GIVEN_UP)
    assert is_missed("engine-b", health), "engines of another set do not answer its run"
    assert limits_of("engine-2") is LIMITS["engine"]
